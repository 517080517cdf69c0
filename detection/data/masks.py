"""Masks in the form that Detectron2 and pycocotools compute with."""

from __future__ import annotations

from typing import Any

import numpy as np

from kscl.data.annotated.masks import Mask, RunLengths

Packed = dict[str, Any]  # {"size": [height, width], "counts": bytes}, as pycocotools has them


def segmentation(mask: Mask) -> list[Any] | Packed | None:
    """Return what Detectron2's dicts have: polygons as they are, or packed run lengths.

    Polygons of fewer than three points, which only public benchmarks may have, are left out as its
    own loader does; None if nothing is left.
    """
    if not isinstance(mask, RunLengths):
        return [points.ravel() for points in mask.parts if len(points) >= 3] or None
    from pycocotools import mask as coco_masks

    runs = {"size": [mask.height, mask.width], "counts": mask.counts.tolist()}
    return dict(coco_masks.frPyObjects(runs, mask.height, mask.width))


def packed(mask: Mask, height: int, width: int) -> Packed:
    """Return the pixels of a mask as run lengths; polygons are filled as pycocotools does."""
    from pycocotools import mask as coco_masks

    found = segmentation(mask)
    if isinstance(found, dict):
        return found
    if found is None:
        nothing = {"size": [height, width], "counts": [height * width]}
        return dict(coco_masks.frPyObjects(nothing, height, width))
    return dict(coco_masks.merge(coco_masks.frPyObjects(found, height, width)))


def packed_pixels(pixels: np.ndarray[Any, Any]) -> Packed:
    """Return the run lengths of a mask that is given as pixels (height, width)."""
    from pycocotools import mask as coco_masks

    return dict(coco_masks.encode(np.asfortranarray(pixels, np.uint8)))
