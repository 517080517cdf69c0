"""Tar shards in the WebDataset layout, on this disk or remote, read in any order.

Files that share a name up to the first dot belong to one sample: `000017.jpg` and `000017.cls`.
Each shard is scanned once for the offsets of its images; after that an image is a single read,
so the order of local shards depends on seed and epoch alone.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import re
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from http.client import HTTPException
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import numpy as np
from iopath.common.file_io import file_lock

from kscl.data.formats import is_image
from kscl.data.source import (
    Index,
    Labels,
    Lost,
    Names,
    cache_folder,
    is_remote,
    load_index,
    number_classes,
    save_index,
    stamps,
)
from kscl.errors import KsclError
from kscl.rng import Stream, permutation, uniforms
from kscl.runtime.files import sha256_of
from kscl.runtime.logs import progress
from kscl.runtime.paths import ATTEMPTS, cached_file, cached_path, path_manager

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
BUFFER_IMAGES = 16_384

Result = TypeVar("Result")


class ShardSource:
    """Images inside tar files."""

    def __init__(self, where: str, shards: list[str], index: Index) -> None:
        self.where = where
        self.shards = shards
        self.names: Names = index["names"]  # of the members
        self.shard = index["shard"]  # which of the shards, int32
        self.offset = index["offset"]  # int64
        self.size = index["size"]  # int64
        lost = (line.split("\0") for line in index["lost"])
        self.lost = [Lost(name, reason, int(count)) for name, reason, count in lost]
        self._classes: Names = index["classes"]

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        """Return the path of the shard and the name of the member."""
        return f"{self.shards[self.shard[index]]}/{self.names[index]}"

    def read(self, index: int) -> bytes:
        """Return the encoded image."""
        with self._open(self.shards[self.shard[index]]) as file:
            return os.pread(file.fileno(), int(self.size[index]), int(self.offset[index]))

    def _open(self, shard: str) -> IO[bytes]:
        return open(shard, "rb", buffering=0)

    @cached_property
    def labels(self) -> Labels | None:
        """The .cls members'; None if a sample has none."""
        return number_classes(list(self._classes))


class RemoteShards(ShardSource):
    """Images inside tar files that are fetched one by one into a cache of bounded size.

    An epoch visits the shards in random order, and an image moves at most BUFFER_IMAGES places, so
    only the shards of so many images are needed at a time. The order is a pure function of seed and
    epoch, whatever the number of ranks and workers.
    """

    def __init__(
        self, where: str, shards: list[str], index: Index, cache: Path, max_bytes: float
    ) -> None:
        super().__init__(where, shards, index)
        self.cache, self.max_bytes = cache, max_bytes
        self.sha256: Names = index["sha256"]  # of every shard

    def epoch_order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the order in which an epoch shows the images."""
        place = np.argsort(permutation(seed, epoch, Stream.ORDER, len(self.shards)))  # of a shard
        in_turn = np.argsort(place[self.shard], kind="stable")
        shift = uniforms(seed, epoch, Stream.BUFFER, 0, len(self)) * BUFFER_IMAGES
        return in_turn[np.argsort(np.arange(len(self)) + shift, kind="stable")]

    def _open(self, shard: str) -> IO[bytes]:
        return _while_kept(self._open_cached, shard, self.cache)

    def _open_cached(self, shard: str) -> IO[bytes]:
        path = cached_path(shard, self.cache)
        if not path.is_file():
            cached_file(shard, self.cache)
            if sha256_of(path) != self.sha256[self.shards.index(shard)]:
                path.unlink(missing_ok=True)
                raise KsclError(
                    f"{shard} has changed since it was indexed (SHA-256). Restore it, or name the "
                    "new shards differently."
                )
            places = [cached_path(other, self.cache) for other in self.shards]
            _drop_oldest(places, path, self.max_bytes)
        file = path.open("rb", buffering=0)
        os.utime(file.fileno())  # the one used last is dropped last
        return file


def is_shard_pattern(where: str) -> bool:
    """Return whether a path stands for tar files."""
    return where.lower().endswith((".tar", *COMPRESSED))


def expand_shards(pattern: str) -> list[str]:
    """Expand `a-{000..012}.tar`, `{train,extra}.tar` and, on local disks, `*.tar`."""
    if pattern.lower().endswith(COMPRESSED):
        raise KsclError(
            f"{pattern} is compressed, so images cannot be read from its middle. "
            "Pack the shards as plain .tar (images are compressed already)."
        )
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [[part] if number % 2 == 0 else _choices(part) for number, part in enumerate(parts)]
    shards = ["".join(choice) for choice in itertools.product(*choices)]
    if not is_remote(pattern):
        found = (sorted(glob.glob(shard)) if "*" in shard else [shard] for shard in shards)
        shards = list(itertools.chain.from_iterable(found))
    if not shards:
        raise KsclError(f"No file matches {pattern}. Check the path.")
    return shards


def _choices(braces: str) -> list[str]:
    if span := re.fullmatch(r"(\d+)\.\.(\d+)", braces):
        first, last = span.groups()
        return [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return braces.split(",")


def open_shards(where: str, shards: list[str], cache_dir: str, cache_gb: float) -> ShardSource:
    """Open tar files; each is scanned once (a remote one is fetched), and the index is cached."""
    remote, cache, max_bytes = is_remote(where), cache_folder(cache_dir), cache_gb * 1e9
    if not remote:
        missing = next((shard for shard in shards if not os.path.isfile(shard)), None)
        if missing is not None:
            raise KsclError(f"The shard {missing} is not a file. Check the path.")
        shards = [os.path.abspath(shard) for shard in shards]
    key = "\n".join(["remote", *shards] if remote else shards)
    index = load_index(cache, key)
    if index is None:
        index = _index_remote(shards, cache, max_bytes) if remote else _index_local(shards)
        save_index(cache, key, index)
    if not len(index["names"]):
        raise KsclError(
            f"{where} holds no image: none of its {len(shards)} shards has a member like "
            "000017.jpg. Pack the images in the WebDataset layout."
        )
    if remote:
        return RemoteShards(where, shards, index, cache, max_bytes)
    return ShardSource(where, shards, index)


def check_reachable(where: str) -> None:
    """Raise KsclError if the first of these remote shards cannot be opened; fetch none of them."""
    first = expand_shards(where)[0]
    try:
        with path_manager.open(first, "rb") as file:
            file.read(1)
    except (OSError, HTTPException, ValueError) as error:
        raise KsclError(
            f"{first} cannot be opened ({error}): check the address and the connection."
        ) from error


Sample = tuple[str, int, int, str]  # name, offset, size and class of an image in a shard
Scanned = tuple[list[Sample], list[Lost]]


def _index_local(shards: list[str]) -> Index:
    started = time.time_ns()
    times = [os.stat(shard).st_mtime_ns for shard in shards]
    return {**_pack([scan(path) for path in shards]), **stamps(shards, times, started)}


def _index_remote(shards: list[str], cache: Path, max_bytes: float) -> Index:
    started = time.time_ns()
    places = [cached_path(shard, cache) for shard in shards]
    scanned, digests = [], []

    def fetch_and_scan(shard: str) -> tuple[Scanned, str]:
        fetched = cached_file(shard, cache)
        return scan(str(fetched), shard), sha256_of(fetched)

    for shard, path in progress(list(zip(shards, places, strict=True)), "Fetching shards"):
        found, digest = _while_kept(fetch_and_scan, shard, cache)
        scanned.append(found)
        digests.append(digest)
        _drop_oldest(places, path, max_bytes)
    return {**_pack(scanned), "sha256": Names.pack(digests), **stamps([], [], started)}


def _pack(scanned: list[Scanned]) -> Index:
    found = [(number, *sample) for number, (samples, _) in enumerate(scanned) for sample in samples]
    shard, name, offset, size, label = zip(*found, strict=True) if found else ((),) * 5
    lost = (lost for _, damage in scanned for lost in damage)
    return {
        "names": Names.pack(name),
        "shard": np.array(shard, np.int32),
        "offset": np.array(offset, np.int64),
        "size": np.array(size, np.int64),
        "classes": Names.pack(label),
        "lost": Names.pack(f"{name}\0{reason}\0{count}" for name, reason, count in lost),
    }


def scan(path: str, name: str = "") -> Scanned:
    """Return the first image of every sample in a shard, and the damage, reported under `name`.

    Files of one sample share their path up to the first dot.
    """
    images: dict[str, Member] = {}
    classes: dict[str, str] = {}
    gaps: list[Gap] = []
    with open(path, "rb") as file:
        for member in read_members(path, gaps):
            base = member.name.rpartition("/")[2]
            stem, _, extension = base.partition(".")
            key = member.name.removesuffix(base) + stem
            if stem and is_image(member.name):  # without a stem: the hidden files that macOS packs
                images.setdefault(key, member)
            elif stem and extension == "cls":
                file.seek(member.offset)
                classes[key] = file.read(min(member.size, 4096)).decode(errors="replace").strip()
    samples = [(*image, classes.get(key, "")) for key, image in images.items()]
    intact = max(1, os.path.getsize(path) - sum(gap.size for gap in gaps))
    lost = []
    for gap in gaps:
        where = f"after the member {gap.after}" if gap.after else "at its start"
        reason = f"the tar header {where} is damaged; copy or pack the shard again"
        count = max(1, round(gap.size * len(samples) / intact))  # by what the others take
        lost.append(Lost(f"{name or path} at byte {gap.offset}", reason, count))
    return samples, lost


def _while_kept(use: Callable[[str], Result], shard: str, cache: Path) -> Result:
    """Use a cached shard; fetch it again if another process has just made room."""
    for _ in range(ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            return use(shard)
    raise KsclError(
        f"DATA.CACHE_GB is too small: {shard} is dropped from {cache} before it is read. Raise it."
    )


def _drop_oldest(places: list[Path], newest: Path, max_bytes: float) -> None:
    """Remove the files used longest ago until all take at most `max_bytes` (0: any number)."""
    if not max_bytes:
        return
    with file_lock(str(newest.parent / "room")):
        kept = []
        for path in places:
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                kept.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total > max_bytes and path != newest:
                path.unlink(missing_ok=True)
                total -= size


# Python's tarfile silently treats a damaged header as the end of the archive. The functions below
# find the next good header and note the gap.
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
                    if member.size < 0:  # would lead back, and around forever
                        raise tarfile.HeaderError(f"{last} has the size {member.size}")
                    if member.isreg() and member.offset_data + member.size <= length:
                        yield Member(member.name, member.offset_data, member.size)
            except tarfile.ReadError:
                pass  # a long name whose own member's header is damaged, or the end of the file
            end = tar.offset
        if end > length:
            raise tarfile.ReadError("the file ends before its last member does")
        start = _next_header(file, end, length)
        if start < length or any(any(blocks) for _, blocks in _blocks(file, end, length)):
            gaps.append(Gap(end, start - end, last))


def _next_header(file: IO[bytes], start: int, length: int) -> int:
    """Return where the next good header after `start` is, or the length of the file."""
    for offset, blocks in _blocks(file, start, length):
        for at in range(0, len(blocks) if any(blocks) else 0, BLOCK):
            if blocks.startswith(MAGIC, at + MAGIC_OFFSET) and offset + at > start:
                with contextlib.suppress(tarfile.HeaderError):
                    tarfile.TarInfo.frombuf(blocks[at : at + BLOCK], "utf-8", "replace")
                    return offset + at
    return length


def _blocks(file: IO[bytes], start: int, length: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of the rest of a file, some blocks at a time."""
    for offset in range(start, length, SCANNED):
        file.seek(offset)
        yield offset, file.read(min(SCANNED, length - offset))
