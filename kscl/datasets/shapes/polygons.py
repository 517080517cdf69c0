"""The outline of a mask as polygons along the edges of its pixels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.bool_]  # (height, width)
Vertex = tuple[int, int]  # x, y of a corner of pixels

_RIGHT, _DOWN, _LEFT, _UP = (1, 0), (0, 1), (-1, 0), (0, -1)
# Where an edge may lead on, the sharpest right turn first: it keeps to the pixel on its right.
_TURNS = {
    _RIGHT: (_DOWN, _RIGHT, _UP),
    _DOWN: (_LEFT, _DOWN, _RIGHT),
    _LEFT: (_UP, _LEFT, _DOWN),
    _UP: (_RIGHT, _UP, _LEFT),
}


def polygons_of(mask: Pixels, left: int = 0, top: int = 0) -> list[list[int]]:
    """Return polygons [x1, y1, x2, y2, …] that cover the pixels of the mask and no other.

    COCO's polygons have no holes, so a mask with a hole is cut in two through it. `left` and `top`
    are where the mask lies in its picture.
    """
    loops = _loops(mask)
    for loop in loops:
        if _is_hole(loop):
            cut = min(x for x, _ in loop) + 1
            first = polygons_of(mask[:, :cut], left, top)
            return first + polygons_of(mask[:, cut:], left + cut, top)
    return [[value for x, y in loop for value in (x + left, y + top)] for loop in loops]


def _loops(mask: Pixels) -> list[list[Vertex]]:
    """Return the corners of all outlines; the mask is on their right, so holes run to the left."""
    edges = _edges(mask)
    loops = []
    while edges:
        start = min(edges)
        vertex, direction = start, min(edges[start])
        loop: list[Vertex] = []
        while vertex in edges:
            turn = next(each for each in _TURNS[direction] if each in edges[vertex])
            if turn != direction or not loop:
                loop.append(vertex)
            edges[vertex].remove(turn)
            if not edges[vertex]:
                del edges[vertex]
            direction = turn
            vertex = (vertex[0] + turn[0], vertex[1] + turn[1])
            if vertex == start and loop:
                break
        loops.append(loop)
    return loops


def _edges(mask: Pixels) -> dict[Vertex, set[Vertex]]:
    """Return the directions of the edges at each corner, clockwise around the pixels."""
    padded = np.pad(mask, 1)
    inside = padded[1:-1, 1:-1]
    sides = (
        (padded[:-2, 1:-1], (0, 0), _RIGHT),
        (padded[1:-1, 2:], (1, 0), _DOWN),
        (padded[2:, 1:-1], (1, 1), _LEFT),
        (padded[1:-1, :-2], (0, 1), _UP),
    )
    edges: dict[Vertex, set[Vertex]] = {}
    for beside, (dx, dy), direction in sides:
        for y, x in np.argwhere(inside & ~beside).tolist():
            edges.setdefault((x + dx, y + dy), set()).add(direction)
    return edges


def _is_hole(loop: list[Vertex]) -> bool:
    following = loop[1:] + loop[:1]
    twice_area = sum(a[0] * b[1] - a[1] * b[0] for a, b in zip(loop, following, strict=True))
    return twice_area < 0
