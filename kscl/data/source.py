"""What every source of images offers, and the few rules about names that all of them share."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from kscl.data.decode import IMAGE_EXTENSIONS


class Labels(NamedTuple):
    """The class of every image: `classes[numbers[i]]` for image i."""

    classes: list[str]
    numbers: np.ndarray  # int64


class ImageSource(Protocol):
    """A numbered list of encoded images, read one by one in any order."""

    where: str  # as the user named it

    def __len__(self) -> int: ...
    def name(self, index: int) -> str: ...
    def read(self, index: int) -> bytes: ...
    @property
    def labels(self) -> Labels | None: ...


def number_classes(names: list[str]) -> Labels:
    """Classes in the order of their names; class 10 comes after class 2."""
    classes = sorted(set(names), key=lambda name: (int(name) if name.isdecimal() else -1, name))
    number = {name: place for place, name in enumerate(classes)}
    return Labels(classes, np.array([number[name] for name in names], np.int64))


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_EXTENSIONS)


def is_remote(path: str) -> bool:
    """Whether a path has a scheme and so belongs to one of iopath's handlers."""
    return "://" in path


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"
