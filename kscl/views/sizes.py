"""The size of full-size views: one number of pixels, or a schedule over epochs.

A schedule is a list of [first epoch, size], such as [[0, 160], [100, 224]]: 160 pixels in epochs 0
to 99, then 224.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Sizes = int | Sequence[Sequence[int]]
SMALLEST = 8


def size_at(sizes: Sizes, epoch: int) -> int:
    """Return the size in an epoch."""
    return next(size for first, size in reversed(as_schedule(sizes)) if first <= epoch)


def last_size(sizes: Sizes) -> int:
    """Return the size that training ends with, and that the backbone is made for."""
    return as_schedule(sizes)[-1][1]


def as_schedule(sizes: Sizes) -> list[tuple[int, int]]:
    """Return (first epoch, size) of every part of the training."""
    if isinstance(sizes, int):
        return [(0, sizes)]
    return [(first, size) for first, size in sizes]


def mean_pixels(sizes: Sizes, epochs: int) -> float:
    """Return the mean number of pixels of a view over all epochs."""
    return sum(size_at(sizes, epoch) ** 2 for epoch in range(epochs)) / epochs


def check_sizes(sizes: object, epochs: int) -> str | None:
    """Return what is wrong with the sizes of a training of this length, or None."""
    parts: Sequence[Any] = sizes if isinstance(sizes, list | tuple) else [(0, sizes)]
    pairs = [part for part in parts if isinstance(part, list | tuple) and len(part) == 2]
    firsts = [first for first, _ in pairs if _is_whole(first)]
    rising = firsts == sorted(set(firsts)) and firsts[:1] == [0] and firsts[-1] < max(1, epochs)
    if len(firsts) != len(parts) or not rising:
        return (
            "must be pairs [first epoch, size] with rising epochs, from 0 on and before the end of "
            "the training"
        )
    good = all(_is_whole(size) and size >= SMALLEST for _, size in pairs)
    return None if good else f"must be at least {SMALLEST} pixels"


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
