"""What every source of images offers, and how a single file is read."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import numpy as np

from kscl.data.packed_names import Names

logger = logging.getLogger(__name__)

SHOWN_LOST = 20  # on screen; all are counted
MAX_FILE_BYTES = 2**30  # no image of an allowed number of pixels has a larger file


class Labels(NamedTuple):
    """The class of every image: `classes[numbers[i]]` for image i."""

    classes: list[str]
    numbers: np.ndarray  # int64


class Lost(NamedTuple):
    """Images that a source should have but could not list."""

    name: str
    reason: str
    num_images: int = 1  # an estimate where a shard is damaged


class ImageSource(Protocol):
    """A numbered list of encoded images, read one by one in any order."""

    where: str  # as the user named it

    @property
    def lost(self) -> Sequence[Lost]: ...
    def __len__(self) -> int: ...
    def name(self, index: int) -> str: ...
    def read(self, index: int) -> bytes: ...
    @property
    def labels(self) -> Labels | None: ...


def number_classes(names: list[str]) -> Labels:
    """Give each class an index in the order of their names; class 10 comes after class 2."""
    classes = sorted(set(names), key=lambda name: (int(name) if name.isdecimal() else -1, name))
    number = {name: index for index, name in enumerate(classes)}
    return Labels(classes, np.array([number[name] for name in names], np.int64))


def warn_of_lost(lost: Sequence[Lost]) -> None:
    """Log each lost image by name."""
    for name, reason, num_images in lost[:SHOWN_LOST]:
        images = f" (about {num_images} images)" if num_images > 1 else ""
        logger.warning("%s is skipped%s: %s.", name, images, reason)
    if len(lost) > SHOWN_LOST:
        logger.warning("… and %d more like these are skipped.", len(lost) - SHOWN_LOST)


def pack_lost(lost: Sequence[Lost]) -> dict[str, np.ndarray]:
    """Turn lost images into arrays for an index on disk."""
    lines = Names.pack(f"{name}\0{reason}" for name, reason, _ in lost)
    counts = np.array([count for *_, count in lost], np.int64)
    return {"lost_text": lines.text, "lost_ends": lines.ends, "lost_counts": counts}


def unpack_lost(index: dict[str, np.ndarray]) -> list[Lost]:
    """Undo `pack_lost`."""
    lines = Names(index["lost_text"], index["lost_ends"])
    counts = index["lost_counts"].tolist()
    return [
        Lost(name, reason, count)
        for (name, reason), count in zip((line.split("\0") for line in lines), counts, strict=True)
    ]


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a local file for reading; raise OSError for a pipe or device, which could block."""
    try:
        file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error)) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file")
    return file


def read_file(path: str | Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Read a local file; raise OSError if it is not a regular one or larger than allowed."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes / 2**20:g} MiB")
    return content


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # the opening of a pipe would wait for a writer


def is_remote(path: str) -> bool:
    """Return whether a path has a scheme and so belongs to one of iopath's handlers."""
    return "://" in path


def join(folder: str, name: str) -> str:
    """Join a local or remote folder and a name in it."""
    return f"{folder.rstrip('/')}/{name}"
