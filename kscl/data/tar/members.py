"""The members of a tar file, also of one with damage in the middle.

Python's tarfile takes a damaged header for the end of the archive and says nothing. Here the next
good header is looked for, and what lies between is noted.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from typing import IO, NamedTuple

from kscl.errors import KsclError

BLOCK = tarfile.BLOCKSIZE
SCANNED = 2048 * BLOCK  # bytes read at a time
MAGIC, MAGIC_OFFSET = b"ustar", 257  # in the header of a member, in all formats since 1988


class Member(NamedTuple):
    """A regular file in a tar file."""

    name: str
    offset: int  # of its content in the tar file
    size: int


class Gap(NamedTuple):
    """A part of a tar file that no good header describes."""

    offset: int
    size: int
    after: str  # the last member before it


def read_members(path: str, gaps: list[Gap]) -> Iterator[Member]:
    """Yield the regular files of a tar file, and note the damaged parts between them.

    Raise KsclError if the file is not a tar file or ends within a member.
    """
    try:
        with open(path, "rb") as file:
            yield from _members(file, os.path.getsize(path), gaps)
    except (tarfile.TarError, OSError) as error:
        raise KsclError(
            f"The shard {path} cannot be read: {error}. Copy or pack it again."
        ) from error


def _members(file: IO[bytes], length: int, gaps: list[Gap]) -> Iterator[Member]:
    start, last = 0, ""
    while start < length or not start:
        file.seek(start)
        with tarfile.open(fileobj=file, mode="r:") as tar:
            try:
                for member in tar:
                    last = member.name
                    if member.size < 0:  # would lead back, and around for ever
                        raise tarfile.HeaderError(f"{last} has the size {member.size}")
                    if member.isreg() and member.offset_data + member.size <= length:
                        yield Member(member.name, member.offset_data, member.size)
            except tarfile.ReadError:
                pass  # a long name whose own member's header is damaged, or the end of the file
            end = tar.offset
        if end > length:
            raise tarfile.ReadError("the file ends before its last member does")
        start = _next_header(file, end, length)
        if start < length or not _is_blank(file, end, length):
            gaps.append(Gap(end, start - end, last))


def _next_header(file: IO[bytes], start: int, length: int) -> int:
    """Return where the next good header after `start` is, or the length of the file."""
    for offset in range(start, length, SCANNED):
        file.seek(offset)
        blocks = file.read(SCANNED)
        if not any(blocks):
            continue
        for at in range(0, len(blocks), BLOCK):
            if blocks.startswith(MAGIC, at + MAGIC_OFFSET) and offset + at > start:
                try:
                    tarfile.TarInfo.frombuf(blocks[at : at + BLOCK], "utf-8", "replace")
                except tarfile.HeaderError:
                    continue
                return offset + at
    return length


def _is_blank(file: IO[bytes], start: int, length: int) -> bool:
    """Return whether only zeros follow, as at the end of a good tar file."""
    for offset in range(start, length, SCANNED):
        file.seek(offset)
        if any(file.read(min(SCANNED, length - offset))):
            return False
    return True
