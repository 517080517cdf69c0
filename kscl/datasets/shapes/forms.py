"""The five forms, each as a table of signed distances to its outline.

A distance gives everything that drawing needs: the anti-aliased edge, the soft shadow, the rounded
rim. Looking it up costs the same for a heart as for a disc.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from kscl.datasets.shapes.chance import Field, cos_sin

Outline = list[tuple[float, float]]

# All forms cover the same area, so that brightness does not tell them apart.
AREA = 1.9
ROUNDING = 0.05
# The tables reach this far from the center, in radii; no outline comes near.
REACH = 1.75
_CELLS = 224


def _disc() -> Outline:
    return [cos_sin(k / 48) for k in range(48)]


def _star() -> Outline:
    radii = (1.0, 0.46)
    corners = [(radii[k % 2], cos_sin(k / 10 - 0.25)) for k in range(10)]
    return [(r * c, r * s) for r, (c, s) in corners]


def _triangle() -> Outline:
    return [cos_sin(k / 3 - 0.25) for k in range(3)]


def _cross() -> Outline:
    arm = [(1.0, -0.36), (1.0, 0.36), (0.36, 0.36)]
    return [
        (x * c - y * s, x * s + y * c)
        for c, s in (cos_sin(quarter / 4) for quarter in range(4))
        for x, y in arm
    ]


def _heart() -> Outline:
    points = []
    for k in range(48):
        if 0 < abs(k - 24) < 4:
            continue  # the curve ends in a needle, which a rounded rim would make a knob
        s = cos_sin(k / 48)[1]
        c1, c2, c3, c4 = (cos_sin(n * k / 48)[0] for n in (1, 2, 3, 4))
        points.append((s * s * s, -(13 * c1 - 5 * c2 - 2 * c3 - c4) / 16))
    return points


_OUTLINES = {
    "star": _star,
    "heart": _heart,
    "cross": _cross,
    "triangle": _triangle,
    "disc": _disc,
}
FORMS = tuple(_OUTLINES)


@cache
def outline_of(form: str) -> Outline:
    """Return the outline around its center of mass, scaled to the common area."""
    outline = _OUTLINES[form]()
    area = center_x = center_y = 0.0
    for (x0, y0), (x1, y1) in zip(outline, outline[1:] + outline[:1], strict=True):
        twist = x0 * y1 - x1 * y0
        area += twist / 2
        center_x += (x0 + x1) * twist / 6
        center_y += (y0 + y1) * twist / 6
    scale = math.sqrt(AREA / abs(area))
    return [((x - center_x / area) * scale, (y - center_y / area) * scale) for x, y in outline]


@cache
def distance_table(form: str) -> Field:
    """Return signed distances (inside negative) on a square grid over [-REACH, REACH]²."""
    outline = outline_of(form)
    steps = np.arange(_CELLS) * (2 * REACH / (_CELLS - 1)) - REACH
    x, y = steps[None, :], steps[:, None]
    nearest = np.full((_CELLS, _CELLS), np.inf)
    inside = np.zeros((_CELLS, _CELLS), dtype=bool)
    for (x0, y0), (x1, y1) in zip(outline, outline[1:] + outline[:1], strict=True):
        dx, dy = x1 - x0, y1 - y0
        along = np.clip(((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy), 0, 1)
        off_x, off_y = x - x0 - along * dx, y - y0 - along * dy
        nearest = np.minimum(nearest, off_x * off_x + off_y * off_y)
        if dy != 0:
            inside ^= ((y0 > y) != (y1 > y)) & (x < x0 + (y - y0) * (dx / dy))
    distance = np.sqrt(nearest)
    return (np.where(inside, -distance, distance) - ROUNDING).astype(np.float32)


def signed_distance(form: str, u: Field, v: Field) -> Field:
    """Interpolate the distance to the outline at the points (u, v), in radii."""
    table = distance_table(form).ravel()
    per_radius = (_CELLS - 1) / (2 * REACH)
    column = np.clip((u + REACH) * per_radius, 0, _CELLS - 1.001)
    row = np.clip((v + REACH) * per_radius, 0, _CELLS - 1.001)
    left, top = np.floor(column), np.floor(row)
    right, low = column - left, row - top
    corner = (top * _CELLS + left).astype(np.int32)
    upper = table[corner]
    upper += (table[corner + 1] - upper) * right
    lower = table[corner + _CELLS]
    lower += (table[corner + _CELLS + 1] - lower) * right
    return upper + (lower - upper) * low
