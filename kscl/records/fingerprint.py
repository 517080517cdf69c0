"""The data of a run as one short hash: every name and size, and contents.

Annotations and lists count with every byte, images by a sample.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import os
import stat
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kscl.data.source import (
    ANY_SIZE,
    Index,
    Lost,
    Walk,
    cache_folder,
    load_index,
    save_index,
    stamps,
    walk_files,
    warn_of_lost,
)
from kscl.errors import KsclError

logger = logging.getLogger(__name__)

SAMPLED_FILES = 256
SAMPLED_BYTES = 64 * 1024  # from the start and from the end of each sampled file
# Files of boxes, classes and lists: an edit may keep their size, so all of their bytes count.
TEXT_FILES = (".xml", ".txt", ".json", ".jsonl", ".csv", ".tsv", ".yaml", ".yml", ".names")

CACHED_FROM = 1000  # files; fewer take milliseconds
CHECKED_FILES = 20_000  # whose sizes and times a cached fingerprint is checked by
HASHED_TOGETHER = 10_000  # names and sizes


@dataclass(frozen=True)
class Fingerprint:
    """A hash of some data, and how much of it there is."""

    hash: str
    files: int
    bytes: int

    def as_dict(self) -> dict[str, object]:
        """Return the fields as a record has them."""
        return asdict(self)


class _File(NamedTuple):
    name: str  # relative, with /; "" for a single file
    size: int
    time: int  # of its last change, in ns


def fingerprint(path: str | Path, cache_dir: str = "") -> Fingerprint:
    """Hash a file or folder: the same for equal copies anywhere, whatever their dates.

    The fingerprint of a large folder is cached like an index of its images. It is made again when
    anything was added, removed or renamed, or when one of CHECKED_FILES files (a set that is not
    larger is checked whole) or any of TEXT_FILES has another time or size. With
    100,000 images that takes 0.12 CPU seconds instead of 1.05, 9 times less; with a million images
    the check takes no longer.
    """
    root = os.path.abspath(path)
    try:
        status = os.stat(root)
    except OSError as error:
        raise KsclError(f"{path} has no fingerprint: {error.strerror}. Check the path.") from error
    if stat.S_ISDIR(status.st_mode):
        return _of_folder(root, cache_dir)
    if not stat.S_ISREG(status.st_mode):
        raise KsclError(f"{path} has no fingerprint: it is neither a file nor a folder.")
    return _make(root, [_File("", status.st_size, status.st_mtime_ns)])


def fingerprint_of_list(where: str) -> Fingerprint | None:
    """Hash the images in a text list; None if none exists, e.g. relative to another folder."""
    from kscl.data.open import open_list  # imports torch, which a leaderboard does without

    try:
        source = open_list(where)
    except KsclError:  # reported where the list is opened
        return None
    files = set()
    for name in source.names:
        try:
            status = os.stat(os.path.join(source.root, name))
        except (OSError, ValueError):
            continue
        files.add(_File(name, status.st_size, status.st_mtime_ns))
    return _make(source.root, sorted(files)) if files else None


def _of_folder(root: str, cache_dir: str) -> Fingerprint:
    cache, key = cache_folder(cache_dir), f"{root}\nfingerprint with whole texts"
    known = load_index(cache, key)
    if known is not None:
        return Fingerprint(known["hash"].tobytes().decode(), *known["counts"].tolist())
    started, met = time.time_ns(), Walk()
    files = []
    for name, entry in walk_files(root, met):
        try:
            status = entry.stat()
            files.append(_File(name, status.st_size, status.st_mtime_ns))
        except OSError as error:  # removed since it was listed
            met.lost.append(Lost(entry.path, error.strerror or str(error)))
    warn_of_lost(met.lost)
    if not files:
        raise KsclError(f"{root} has no fingerprint: it holds no file.")
    found = _make(root, sorted(files))
    if len(files) >= CACHED_FROM and not met.lost:
        save_index(cache, key, _pack(found, root, files, met, started))
    return found


def _make(root: str, files: list[_File]) -> Fingerprint:
    """Hash sorted files."""
    digest = hashlib.sha256()
    for start in range(0, len(files), HASHED_TOGETHER):
        part = files[start : start + HASHED_TOGETHER]
        text = "".join(f"{file.name}\0{file.size}\0" for file in part)
        digest.update(text.encode("utf-8", "surrogateescape"))
    sampled = _first_by_hash(files, SAMPLED_FILES)
    for file in sorted(sampled):
        digest.update(_content(_path(root, file), _sample))
    known = {file for file in sampled if file.size <= 2 * SAMPLED_BYTES}  # whole, in the sample
    for file in files:
        if _is_text(root, file) and file not in known:
            digest.update(_content(_path(root, file), _whole))
    return Fingerprint(digest.hexdigest()[:16], len(files), sum(file.size for file in files))


def _path(root: str, file: _File) -> str:
    return os.path.join(root, file.name) if file.name else root


def _is_text(root: str, file: _File) -> bool:
    return (file.name or root).lower().endswith(TEXT_FILES)


def _first_by_hash(files: list[_File], count: int) -> list[_File]:
    """Choose files by the hashes of their names, so that the choice is the same everywhere."""
    return heapq.nsmallest(count, files, lambda f: hashlib.md5(os.fsencode(f.name)).digest())


def _content(path: str, read: Callable[[BufferedReader], bytes]) -> bytes:
    """Read a file, or mark it as unreadable: a run skips an image that cannot be read."""
    try:
        with open(path, "rb") as file:
            return read(file)
    except OSError as error:
        logger.warning("%s cannot be read: %s.", path, error.strerror)
        return b"\0unreadable\0"


def _sample(file: BufferedReader) -> bytes:
    start = file.read(SAMPLED_BYTES)
    file.seek(max(SAMPLED_BYTES, os.fstat(file.fileno()).st_size - SAMPLED_BYTES))
    return start + file.read()


def _whole(file: BufferedReader) -> bytes:
    return hashlib.file_digest(file, "sha256").digest()


def _pack(found: Fingerprint, root: str, files: list[_File], met: Walk, started: int) -> Index:
    checked = files
    if len(files) > CHECKED_FILES:
        texts = [file for file in files if _is_text(root, file)]
        checked = sorted({*texts, *_first_by_hash(files, CHECKED_FILES)})
    return {
        "hash": np.frombuffer(found.hash.encode(), np.uint8),
        "counts": np.array([found.files, found.bytes], np.int64),
        **stamps(
            [*met.folders, *(_path(root, file) for file in checked)],
            [*met.times, *(file.time for file in checked)],
            started,
            [*[ANY_SIZE] * len(met.folders), *(file.size for file in checked)],
        ),
    }
