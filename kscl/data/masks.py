"""Masks of objects as COCO files have them: polygons, or run lengths over the image's columns.

Run lengths count pixels column by column, background first. They are written as a list of numbers
or packed into a text; here they are always an array of numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]  # (n, 2) x and y, 0-based; a whole image is (0, 0) to (width, height)
Counts = NDArray[np.int64]

LONGEST_RUN = 2**40  # pixels; more cannot be one image, and sums stay exact
MAX_CHARACTERS = 9  # of one packed number: 45 bits


@dataclass(frozen=True, slots=True, eq=False)
class Polygons:
    """A mask as the union of polygons."""

    parts: tuple[Points, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RunLengths:
    """A mask as the lengths of its runs in an image of this size."""

    height: int
    width: int
    counts: Counts


Mask = Polygons | RunLengths


def palette() -> NDArray[np.uint8]:
    """Return VOC's colors (256, 3) of class numbers: the lowest bits of a number weigh most."""
    numbers, colors = np.arange(256), np.zeros((256, 3), np.int64)
    for bit in range(8):
        colors |= ((numbers[:, None] >> (3 * bit + np.arange(3))) & 1) << (7 - bit)
    return colors.astype(np.uint8)


def read_mask(value: Any) -> Mask | None:
    """Return a `segmentation` of a COCO file; raise ValueError that says what is wrong with it."""
    if value is None or value == []:
        return None
    if isinstance(value, dict):
        return _read_run_lengths(value)
    if not isinstance(value, list):
        raise ValueError("its segmentation is neither a list of polygons nor run lengths")
    return Polygons(tuple(_read_polygon(part) for part in value))


def _read_polygon(part: Any) -> Points:
    if not isinstance(part, list) or not all(is_number(value, below=1e9) for value in part):
        raise ValueError("its segmentation has a polygon that is not a list of numbers")
    if not part or len(part) % 2:
        raise ValueError(
            f"its segmentation has a polygon of {len(part)} numbers, not x and y of every point"
        )
    return np.array(part, np.float64).reshape(-1, 2)


def _read_run_lengths(value: dict[str, Any]) -> RunLengths:
    size, counts = value.get("size"), value.get("counts")
    if not (isinstance(size, list) and len(size) == 2 and all(_is_count(side) for side in size)):
        raise ValueError(f"its segmentation has the size {size!r}, not [height, width]")
    if isinstance(counts, str):
        numbers = unpack_counts(counts)
    elif isinstance(counts, list) and all(_is_count(number) for number in counts):
        numbers = np.array(counts, np.int64)
    else:
        raise ValueError("its segmentation has run lengths that are neither numbers nor a text")
    height, width = size
    if int(numbers.sum()) != height * width:
        raise ValueError(
            f"its segmentation has run lengths of {int(numbers.sum())} pixels in all, but its size "
            f"is {height} x {width}"
        )
    return RunLengths(height, width, numbers)


def unpack_counts(text: str) -> Counts:
    """Return the numbers that a packed text stands for; raise ValueError if it is damaged.

    A character holds five bits, lowest first, and whether more follow; from the third number on
    the difference to the last but one is written.
    """
    numbers: list[int] = []
    number = characters = 0
    for character in text:
        code = ord(character) - 48
        if not 0 <= code < 64 or characters == MAX_CHARACTERS:
            raise ValueError("its segmentation has packed run lengths that are damaged")
        number |= (code & 31) << (5 * characters)
        characters += 1
        if code & 32:
            continue
        if code & 16:  # the highest bit is the sign
            number -= 1 << (5 * characters)
        numbers.append(number + (numbers[-2] if len(numbers) > 2 else 0))
        if not 0 <= numbers[-1] < LONGEST_RUN:
            raise ValueError("its segmentation has packed run lengths that are damaged")
        number = characters = 0
    if characters:
        raise ValueError("its segmentation has packed run lengths that are cut off")
    return np.array(numbers, np.int64)


def run_lengths(pixels: NDArray[np.bool_]) -> RunLengths:
    """Return the runs of a mask that is given as pixels (height, width)."""
    flat = pixels.T.ravel()
    changes = np.flatnonzero(np.diff(flat, prepend=False)) if flat.size else np.zeros(0, np.int64)
    counts = np.diff(changes, prepend=0, append=flat.size)
    height, width = pixels.shape
    return RunLengths(height, width, counts)


def extent(mask: Mask) -> tuple[float, float, float, float] | None:
    """Return the box around a mask, or None if it is empty."""
    if isinstance(mask, Polygons):
        points = np.concatenate(mask.parts)
        return (*points.min(axis=0).tolist(), *points.max(axis=0).tolist())
    ends = np.cumsum(mask.counts)
    first, last = ends[0::2][: len(ends) // 2], ends[1::2]  # of the runs that are the object
    first, last = first[last > first], last[last > first]
    if not len(first):
        return None
    columns = first // mask.height, (last - 1) // mask.height
    wraps = (columns[0] != columns[1]).any()  # a run over two columns touches top and bottom
    top = 0 if wraps else int((first % mask.height).min())
    bottom = mask.height if wraps else int(((last - 1) % mask.height).max()) + 1
    return float(columns[0].min()), float(top), float(columns[1].max() + 1), float(bottom)


def is_number(value: Any, least: float = -math.inf, below: float = 1e18) -> bool:
    """Return whether a value of a JSON file is a number in bounds; NaN, inf and texts are not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return least <= value and abs(value) < below


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and is_number(value, 0, LONGEST_RUN)
