"""Tar shards in the WebDataset layout, read in any order.

Files that share a name up to the first dot belong to one sample: `000017.jpg` and `000017.cls`.
Each shard is looked through once for where its images lie; after that an image is one read at an
offset, so shards keep an order that depends on seed and epoch alone.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import time
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from kscl.data.formats import is_image
from kscl.data.index_cache import Arrays, cache_folder, load_index, modified_ns, save_index, stamps
from kscl.data.packed_names import Names
from kscl.data.source import Labels, Lost, is_remote, number_classes, pack_lost, unpack_lost
from kscl.data.tar.members import Gap, Member, read_members
from kscl.errors import KsclError

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")

Sample = tuple[str, int, int, str]  # name, offset, size, class


class ShardSource:
    """Images inside tar files."""

    def __init__(self, where: str, shards: list[str], index: Arrays) -> None:
        self.where = where
        self.shards = shards
        self.names = Names(index["text"], index["ends"])  # of the members
        self.shard = index["shard"]  # which of the shards, int32
        self.offset = index["offset"]  # int64
        self.size = index["size"]  # int64
        self.lost = unpack_lost(index)
        self._classes = Names(index["class_text"], index["class_ends"])

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        """Return the path of the shard and the name of the member."""
        return f"{self.shards[self.shard[index]]}/{self.names[index]}"

    def read(self, index: int) -> bytes:
        """Return the encoded image."""
        with open(self.shards[self.shard[index]], "rb", buffering=0) as file:
            return os.pread(file.fileno(), int(self.size[index]), int(self.offset[index]))

    @cached_property
    def labels(self) -> Labels | None:
        """The .cls members'; None if a sample has none."""
        classes = list(self._classes)
        return None if "" in classes else number_classes(classes)


def is_shard_pattern(where: str) -> bool:
    """Return whether a path stands for tar files."""
    return where.lower().endswith((".tar", *COMPRESSED))


def expand_shards(pattern: str) -> list[str]:
    """Write out `a-{000..012}.tar`, `{train,extra}.tar` and, on local disks, `*.tar`."""
    if pattern.lower().endswith(COMPRESSED):
        raise KsclError(
            f"{pattern} is compressed, so images cannot be read from its middle. "
            "Pack the shards as plain .tar (images are compressed already)."
        )
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [[part] if number % 2 == 0 else _choices(part) for number, part in enumerate(parts)]
    shards = ["".join(choice) for choice in itertools.product(*choices)]
    if not is_remote(pattern):
        shards = [
            path
            for shard in shards
            for path in (sorted(glob.glob(shard)) if "*" in shard else [shard])
        ]
    if not shards:
        raise KsclError(f"No file matches {pattern}. Check the path.")
    return shards


def _choices(braces: str) -> list[str]:
    if span := re.fullmatch(r"(\d+)\.\.(\d+)", braces):
        first, last = span.groups()
        return [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return braces.split(",")


def open_shards(where: str, shards: list[str], cache_dir: str = "") -> ShardSource:
    """Open tar files; each is looked through once, and where its images lie is cached."""
    local = [_existing(shard) for shard in shards]
    cache, key = cache_folder(cache_dir), "\n".join(local)
    index = load_index(cache, key)
    if index is None:
        index = _index_shards(local)
        save_index(cache, key, index)
    return ShardSource(where, local, index)


def _existing(shard: str) -> str:
    if not os.path.isfile(shard):
        raise KsclError(f"The shard {shard} is not a file. Check the path.")
    return os.path.abspath(shard)


def _index_shards(shards: list[str]) -> Arrays:
    started = time.time_ns()
    times = [modified_ns(shard) for shard in shards]
    scanned = [scan(path) for path in shards]
    return {**pack_samples(scanned), **stamps(shards, times, started)}


def pack_samples(scanned: list[tuple[list[Sample], list[Lost]]]) -> Arrays:
    """Turn what was found in every shard into arrays for an index on disk."""
    found = [(number, *sample) for number, (samples, _) in enumerate(scanned) for sample in samples]
    shard, name, offset, size, label = zip(*found, strict=True) if found else ((),) * 5
    names, classes = Names.pack(name), Names.pack(label)
    return {
        "text": names.text,
        "ends": names.ends,
        "shard": np.array(shard, np.int32),
        "offset": np.array(offset, np.int64),
        "size": np.array(size, np.int64),
        "class_text": classes.text,
        "class_ends": classes.ends,
        **pack_lost([lost for _, damage in scanned for lost in damage]),
    }


def scan(path: str, name: str = "") -> tuple[list[Sample], list[Lost]]:
    """Return the first image of every sample in a shard, and what damage has hidden.

    `name` is what the user calls the shard, if it is another file's copy.
    """
    images: dict[str, Member] = {}
    classes: dict[str, str] = {}
    gaps: list[Gap] = []
    with open(path, "rb") as file:
        for member in read_members(path, gaps):
            folder, slash, base = member.name.rpartition("/")
            stem, _, extension = base.partition(".")
            key = folder + slash + stem
            if not stem:
                continue  # the hidden files that macOS packs
            if is_image(member.name):
                images.setdefault(key, member)
            elif extension == "cls":
                file.seek(member.offset)
                classes[key] = file.read(min(member.size, 4096)).decode(errors="replace").strip()
    samples = [(*image, classes.get(key, "")) for key, image in images.items()]
    return samples, list(_lost(path, name or path, gaps, samples))


def _lost(path: str, name: str, gaps: list[Gap], samples: list[Sample]) -> Iterator[Lost]:
    """Estimate how many images a gap has swallowed by what the others take of the file."""
    intact = os.path.getsize(path) - sum(gap.size for gap in gaps)
    for gap in gaps:
        count = max(1, round(gap.size * len(samples) / max(intact, 1)))
        where = f"after the member {gap.after}" if gap.after else "at its start"
        yield Lost(
            f"{name} at byte {gap.offset}",
            f"the tar header {where} is damaged; copy or pack the shard again",
            count,
        )
