"""Masks as pixels by numpy alone: the reference that pycocotools and our readers are held to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pixels_of_polygon(points: Sequence[float], height: int, width: int) -> np.ndarray:
    """Return the pixels whose center is inside, by counting the edges on their left."""
    corners = np.array(points, float).reshape(-1, 2)
    x, y = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    inside = np.zeros((height, width), bool)
    for (x0, y0), (x1, y1) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        if y0 != y1:
            inside ^= ((y0 > y) != (y1 > y)) & (x > x0 + (y - y0) * (x1 - x0) / (y1 - y0))
    return inside


def pixels_of_polygons(polygons: Sequence[Sequence[float]], height: int, width: int) -> np.ndarray:
    return np.any([pixels_of_polygon(part, height, width) for part in polygons], axis=0)


def pixels_of_counts(counts: Sequence[int], height: int, width: int) -> np.ndarray:
    values = np.arange(len(counts)) % 2 == 1
    return np.repeat(values, counts).reshape(width, height).T


def mask_iou(found: np.ndarray, wanted: np.ndarray, crowd: bool) -> float:
    """Return the overlap as COCO defines it: over the union, or over the found part of a crowd."""
    shared = np.count_nonzero(found & wanted)
    whole = np.count_nonzero(found) if crowd else np.count_nonzero(found | wanted)
    return shared / whole if whole else 0.0
