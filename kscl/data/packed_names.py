"""Many strings in one block of bytes: a list of a million paths that workers can share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np


class Names(Sequence[str]):
    """A read-only list of strings kept in two arrays.

    A Python list of a million strings is copied bit by bit into every worker as its reference
    counts are touched; two arrays are not, and they are saved and loaded in one piece.
    """

    def __init__(self, text: np.ndarray, ends: np.ndarray) -> None:
        self.text = text  # uint8, the encoded strings without a separator
        self.ends = ends  # int64, where each string ends

    @classmethod
    def pack(cls, names: Iterable[str]) -> Names:
        encoded = [os.fsencode(name) for name in names]
        ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        start = self.ends[place - 1] if place else 0
        return os.fsdecode(self.text[start : self.ends[place]].tobytes())
