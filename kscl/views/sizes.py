"""The size of full-size views: one number of pixels, or a schedule over epochs.

A schedule is a list of [first epoch, size], such as [[0, 160], [100, 224]]: 160 pixels in epochs 0
to 99, then 224.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    """Return the mean number of pixels of a view over a training of so many epochs."""
    return sum(size_at(sizes, epoch) ** 2 for epoch in range(epochs)) / epochs


def check_sizes(sizes: object, epochs: int) -> str | None:
    """Return what is wrong with sizes for a training of so many epochs, or None."""
    if isinstance(sizes, list | tuple):
        parts = [part for part in sizes if isinstance(part, list | tuple) and len(part) == 2]
        firsts = [part[0] for part in parts]
        wanted = (
            "must be pairs [first epoch, size] with rising epochs, from 0 on and before the end of "
            "the training"
        )
        if not sizes or len(parts) != len(sizes) or not all(_is_whole(first) for first in firsts):
            return wanted
        if firsts != sorted(set(firsts)) or firsts[0] != 0 or firsts[-1] >= epochs:
            return wanted
        values = [part[1] for part in parts]
    else:
        values = [sizes]
    good = all(_is_whole(value) and value >= SMALLEST for value in values)
    return None if good else f"must be at least {SMALLEST} pixels"


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
