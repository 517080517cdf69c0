"""Whole pictures: one dominant object, or a crowded scene with a box for every object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kscl.data.annotated.masks import run_lengths
from kscl.datasets.shapes.canvas import Canvas, column, new_canvas, ramp
from kscl.datasets.shapes.chance import Chance
from kscl.datasets.shapes.classes import CLASSES
from kscl.datasets.shapes.clutter import cross_in_front, scatter_behind
from kscl.datasets.shapes.objects import Pose, paint_object, random_pose
from kscl.datasets.shapes.polygons import Pixels, polygons_of

Picture = NDArray[np.uint8]  # (H, W, 3)

# An object counts as difficult if less of it than this shows, or if its box is narrower than this
# fraction of the picture's shorter side.
DIFFICULT_FRACTION = 0.65
DIFFICULT_WIDTH = 0.11
_TRIES = 60


@dataclass(frozen=True)
class SceneObject:
    """One annotated object; the box is 1-based and includes its last pixel, as in VOC."""

    label: int
    box: tuple[int, int, int, int]  # xmin, ymin, xmax, ymax
    truncated: bool
    difficult: bool
    area: int = field(repr=False)  # pixels of it that show
    segmentation: Any = field(repr=False)  # those pixels, as COCO files have them


@dataclass(frozen=True)
class Scene:
    """What is in a picture of this size."""

    width: int
    height: int
    objects: tuple[SceneObject, ...]


def draw_portrait(label: int, size: int, chance: Chance) -> Picture:
    """Draw one object that fills about half of a square picture."""
    canvas = new_canvas(size, size, chance)
    scatter_behind(canvas, chance.integer(0, 3), chance)
    radius = chance.uniform(0.3, 0.42) * size
    x, y = (size * chance.uniform(0.43, 0.57) for _ in range(2))
    paint_object(canvas, CLASSES[label], random_pose(x, y, radius, chance), 1, chance)
    cross_in_front(canvas, chance.integer(0, 1), chance)
    return _developed(canvas, chance)


def draw_scene(
    labels: Sequence[int], size: int, chance: Chance
) -> tuple[Picture, tuple[SceneObject, ...]]:
    """Draw a picture with an object for each label; `size` is the shorter side."""
    long_side = size + size // 4
    height, width = chance.shuffled(
        [(size, size), (size, size), (size, long_side), (long_side, size)]
    )[0]
    canvas = new_canvas(height, width, chance)
    scatter_behind(canvas, chance.integer(2, 7), chance)
    poses = _spread(len(labels), height, width, chance)
    areas = [
        paint_object(canvas, CLASSES[label], pose, number, chance)
        for number, (label, pose) in enumerate(zip(labels, poses, strict=True), start=1)
    ]
    cross_in_front(canvas, chance.integer(0, 3), chance)
    candidates = [
        _annotated(canvas, label, number, area)
        for number, (label, area) in enumerate(zip(labels, areas, strict=True), start=1)
    ]
    return _developed(canvas, chance), tuple(each for each in candidates if each is not None)


def _spread(count: int, height: int, width: int, chance: Chance) -> list[Pose]:
    """Spread poses over the picture; some overlap, some cross the border, a few are tiny."""
    size = min(height, width)
    placed: list[Pose] = []
    for _ in range(count):
        tiny, crowding = chance.happens(0.06), chance.happens(0.4)
        radius = size * (chance.uniform(0.035, 0.05) if tiny else chance.uniform(0.09, 0.18))
        for _ in range(_TRIES):
            x = chance.uniform(0.6 * radius, width - 0.6 * radius)
            y = chance.uniform(0.6 * radius, height - 0.6 * radius)
            if all(_apart(x, y, radius, other, crowding) for other in placed):
                break
            radius *= 0.98  # a crowded picture has smaller objects, not hidden ones
        placed.append(random_pose(x, y, radius, chance))
    return placed


def _apart(x: float, y: float, radius: float, other: Pose, crowding: bool) -> bool:
    """Return whether two objects hardly touch or, when crowding, do not cover their centers."""
    gap = 0.75 * max(radius, other.radius) if crowding else 0.9 * (radius + other.radius)
    return (x - other.x) * (x - other.x) + (y - other.y) * (y - other.y) >= gap * gap


def _annotated(
    canvas: Canvas, label: int, number: int, area: tuple[int, int]
) -> SceneObject | None:
    """Annotate the object as it shows in the end; return None if all of it is hidden."""
    whole, inside = area
    shows = canvas.owner == number
    columns, rows = np.flatnonzero(shows.any(axis=0)), np.flatnonzero(shows.any(axis=1))
    if columns.size < 2 or rows.size < 2:
        return None
    left, right = int(columns[0]), int(columns[-1])
    top, bottom = int(rows[0]), int(rows[-1])
    narrow = DIFFICULT_WIDTH * min(canvas.height, canvas.width)
    small = min(right - left, bottom - top) + 1 < narrow
    visible = int(np.count_nonzero(shows))
    difficult = small or visible < DIFFICULT_FRACTION * whole
    return SceneObject(
        label=label,
        box=(left + 1, top + 1, right + 1, bottom + 1),
        truncated=inside < whole,
        difficult=difficult,
        area=visible,
        segmentation=(
            _runs(shows)
            if difficult
            else polygons_of(shows[top : bottom + 1, left : right + 1], left, top)
        ),
    )


def _runs(shows: Pixels) -> dict[str, list[int]]:
    return {"size": list(shows.shape), "counts": run_lengths(shows).counts.tolist()}


def _developed(canvas: Canvas, chance: Chance) -> Picture:
    """Add uneven light, a tint, the lens's dark corners and the sensor's grain; round to 8 bits."""
    height, width = canvas.height, canvas.width
    light = 1 + ramp(height, width, canvas.light) * chance.uniform(0, 0.25)
    across, down = ramp(height, width, (1.0, 0.0)), ramp(height, width, (0.0, 1.0))
    light -= (across * across + down * down) * chance.uniform(0, 0.15)
    light *= chance.uniform(0.95, 1.12)
    tint = column((chance.uniform(0.9, 1), chance.uniform(0.9, 1), chance.uniform(0.9, 1)))
    grain = chance.bytes(2, 3, height, width).astype(np.float32)
    noise = (grain[0] - grain[1]) * (chance.uniform(0.01, 0.03) / 255)
    pixels = np.clip(canvas.pixels * (light * tint) + noise, 0, 1)
    return np.ascontiguousarray((pixels * 255 + 0.5).astype(np.uint8).transpose(1, 2, 0))
