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
import tarfile
import time
from functools import cached_property

import numpy as np
from iopath.common.file_io import g_pathmgr

from kscl.data.index_cache import Arrays, cache_folder, load_index, modified_ns, save_index, stamps
from kscl.data.packed_names import Names
from kscl.data.source import Labels, is_image, is_remote, number_classes
from kscl.errors import KsclError

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


class ShardSource:
    """Images inside tar files."""

    def __init__(self, where: str, shards: list[str], index: Arrays) -> None:
        self.where = where
        self.shards = shards
        self.names = Names(index["text"], index["ends"])  # of the members
        self.shard = index["shard"]  # which of the shards, int32
        self.offset = index["offset"]  # int64
        self.size = index["size"]  # int64
        self._classes = Names(index["class_text"], index["class_ends"])

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return f"{self.shards[self.shard[index]]}/{self.names[index]}"

    def read(self, index: int) -> bytes:
        with open(self.shards[self.shard[index]], "rb", buffering=0) as file:
            return os.pread(file.fileno(), int(self.size[index]), int(self.offset[index]))

    @cached_property
    def labels(self) -> Labels | None:
        """From the .cls members: none if a sample has none."""
        classes = list(self._classes)
        return None if "" in classes else number_classes(classes)


def is_shard_pattern(where: str) -> bool:
    return where.lower().endswith((".tar", *COMPRESSED))


def expand_shards(pattern: str) -> list[str]:
    """`a-{000..012}.tar`, `{train,extra}.tar` and, on local disks, `*.tar`, written out."""
    if pattern.lower().endswith(COMPRESSED):
        raise KsclError(
            f"{pattern} is compressed, so images cannot be read from its middle: "
            "pack the shards as plain .tar (images are compressed already)"
        )
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [[part] if place % 2 == 0 else _choices(part) for place, part in enumerate(parts)]
    shards = ["".join(choice) for choice in itertools.product(*choices)]
    if not is_remote(pattern):
        shards = [
            path
            for shard in shards
            for path in (sorted(glob.glob(shard)) if "*" in shard else [shard])
        ]
    if not shards:
        raise KsclError(f"no file fits {pattern}")
    return shards


def _choices(braces: str) -> list[str]:
    if span := re.fullmatch(r"(\d+)\.\.(\d+)", braces):
        first, last = span.groups()
        return [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return braces.split(",")


def open_shards(where: str, shards: list[str], cache_dir: str = "") -> ShardSource:
    local = [_local_copy(shard) for shard in shards]
    cache, key = cache_folder(cache_dir), "\n".join(local)
    index = load_index(cache, key)
    if index is None:
        index = _index_shards(local)
        save_index(cache, key, index)
    source = ShardSource(where, local, index)
    if not len(source):
        raise KsclError(
            f"{where} holds no image: none of its {len(local)} shards has a member like 000017.jpg"
        )
    return source


def _local_copy(shard: str) -> str:
    if not g_pathmgr.isfile(shard):
        raise KsclError(f"the shard {shard} is not there")
    # A remote shard is fetched once: reading in any order needs it near.
    return g_pathmgr.get_local_path(shard) if is_remote(shard) else os.path.abspath(shard)


def _index_shards(shards: list[str]) -> Arrays:
    started = time.time_ns()
    times = [modified_ns(shard) for shard in shards]
    found = [(place, *sample) for place, path in enumerate(shards) for sample in _samples(path)]
    place, name, offset, size, label = zip(*found, strict=True) if found else ((),) * 5
    names, classes = Names.pack(name), Names.pack(label)
    return {
        "text": names.text,
        "ends": names.ends,
        "shard": np.array(place, np.int32),
        "offset": np.array(offset, np.int64),
        "size": np.array(size, np.int64),
        "class_text": classes.text,
        "class_ends": classes.ends,
        **stamps(shards, times, started),
    }


def _samples(path: str) -> list[tuple[str, int, int, str]]:
    """(name, offset, size, class) of the first image of every sample in a shard."""
    images: dict[str, tuple[str, int, int]] = {}
    classes: dict[str, str] = {}
    length = os.path.getsize(path)
    try:
        with tarfile.open(path, "r:") as tar, open(path, "rb") as file:
            for member in tar:
                folder, slash, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")
                key = folder + slash + stem
                if not member.isreg() or not stem:
                    continue  # also the hidden files that macOS packs
                if member.offset_data + member.size > length:
                    raise tarfile.ReadError("the file ends before its last member does")
                if is_image(member.name):
                    images.setdefault(key, (member.name, member.offset_data, member.size))
                elif extension == "cls":
                    file.seek(member.offset_data)
                    classes[key] = file.read(member.size).decode(errors="replace").strip()
    except (tarfile.TarError, OSError) as error:
        raise KsclError(
            f"the shard {path} cannot be read: {error}; copy or pack it again"
        ) from error
    return [(*image, classes.get(key, "")) for key, image in images.items()]
