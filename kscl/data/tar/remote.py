"""Tar shards that are not on this disk: fetched one by one into a cache of bounded size.

An epoch goes through the shards in a random order, and an image moves at most BUFFER_IMAGES places
from where its shard puts it. Only the shards of so many images are needed at any time, and still
the order is a pure function of seed and epoch, whatever the number of ranks and workers.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from functools import cached_property, partial
from http.client import HTTPException
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
from iopath.common.file_io import file_lock

from kscl.data.index_cache import Arrays, cache_folder, load_index, save_index, stamps
from kscl.data.packed_names import Names
from kscl.data.source import Lost
from kscl.data.tar.shards import Sample, ShardSource, expand_shards, pack_samples, scan
from kscl.errors import KsclError
from kscl.rng import Stream, permutation, uniforms
from kscl.runtime.files import sha256_of
from kscl.runtime.logs import progress
from kscl.runtime.paths import ATTEMPTS, cached_file, cached_path, path_manager

BUFFER_IMAGES = 16_384

Result = TypeVar("Result")


class RemoteShards(ShardSource):
    """Images inside tar files that are fetched when they are needed."""

    def __init__(
        self, where: str, shards: list[str], index: Arrays, cache: Path, max_bytes: float
    ) -> None:
        super().__init__(where, shards, index)
        self.cache, self.max_bytes = cache, max_bytes
        self.sha256 = Names(index["sha256_text"], index["sha256_ends"])  # of every shard

    def read(self, index: int) -> bytes:
        """Return the encoded image."""
        with self._open(int(self.shard[index])) as file:
            return os.pread(file.fileno(), int(self.size[index]), int(self.offset[index]))

    def epoch_order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the order in which an epoch shows the images."""
        place = np.argsort(permutation(seed, epoch, Stream.ORDER, len(self.shards)))  # of a shard
        in_turn = np.argsort(place[self.shard], kind="stable")
        shift = uniforms(seed, epoch, Stream.BUFFER, 0, len(self)) * BUFFER_IMAGES
        return in_turn[np.argsort(np.arange(len(self)) + shift, kind="stable")]

    def _open(self, number: int) -> IO[bytes]:
        def opened() -> IO[bytes]:
            file = self._fetched(number).open("rb", buffering=0)
            os.utime(file.fileno())  # the one used last is dropped last
            return file

        return _while_kept(opened, self.shards[number], self.cache)

    def _fetched(self, number: int) -> Path:
        shard = self.shards[number]
        path = cached_path(shard, self.cache)
        if path.is_file():
            return path
        path = cached_file(shard, self.cache)
        if sha256_of(path) != self.sha256[number]:
            path.unlink(missing_ok=True)
            raise KsclError(
                f"{shard} has changed since it was indexed (SHA-256). Restore it, or name the new "
                "shards differently."
            )
        drop_oldest(self._kept, path, self.max_bytes)
        return path

    @cached_property
    def _kept(self) -> list[Path]:
        return [cached_path(shard, self.cache) for shard in self.shards]


def open_remote_shards(
    where: str, shards: list[str], cache_dir: str = "", max_gigabytes: float = 0.0
) -> RemoteShards:
    """Open remote tar files; each is fetched once to be indexed, and the index is cached."""
    cache, key = cache_folder(cache_dir), "\n".join(["remote", *shards])
    max_bytes = max_gigabytes * 1e9
    index = load_index(cache, key)
    if index is None:
        index = _index(shards, cache, max_bytes)
        save_index(cache, key, index)
    return RemoteShards(where, shards, index, cache, max_bytes)


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


def _index(shards: list[str], cache: Path, max_bytes: float) -> Arrays:
    started = time.time_ns()
    places = [cached_path(shard, cache) for shard in shards]
    scanned, digests = [], []
    for shard, path in progress(list(zip(shards, places, strict=True)), "Fetching shards"):
        found, digest = _while_kept(partial(_look_through, shard, cache), shard, cache)
        scanned.append(found)
        digests.append(digest)
        drop_oldest(places, path, max_bytes)
    packed = Names.pack(digests)
    return {
        **pack_samples(scanned),
        "sha256_text": packed.text,
        "sha256_ends": packed.ends,
        **stamps([], [], started),
    }


def _look_through(shard: str, cache: Path) -> tuple[tuple[list[Sample], list[Lost]], str]:
    """Return what is in a shard, and its SHA-256."""
    path = cached_file(shard, cache)
    return scan(str(path), shard), sha256_of(path)


def _while_kept(use: Callable[[], Result], shard: str, cache: Path) -> Result:
    """Use a cached shard; fetch it again if another process has made room just then."""
    for _ in range(ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            return use()
    raise KsclError(
        f"{shard} is dropped from {cache} faster than it is read. Make DATA.CACHE_GB larger."
    )


def drop_oldest(places: list[Path], newest: Path, max_bytes: float) -> None:
    """Remove the files used longest ago until all take at most `max_bytes` (0: any number)."""
    if not max_bytes:
        return
    with file_lock(str(newest.parent / "room")):
        kept = []
        for path in places:
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            kept.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total <= max_bytes or path == newest:
                continue
            path.unlink(missing_ok=True)
            total -= size
