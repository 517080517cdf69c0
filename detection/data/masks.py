"""Masks in the form that Detectron2 and pycocotools compute with, and as plain arrays in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from detection.errors import DetectionError
from kscl.data.masks import Mask, RunLengths, unpack_counts

Packed = dict[str, Any]  # {"size": [height, width], "counts": bytes}, as pycocotools has them
Array = np.ndarray[Any, Any]

# name in the file: dtype and number of dimensions
COLUMNS: dict[str, tuple[type, int]] = {
    "mask_sizes": (np.int64, 2),  # (N, 2) height, width
    "mask_ends": (np.int64, 1),  # (N,) where each mask ends in `mask_bytes`
    "mask_bytes": (np.uint8, 1),
}


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


def columns_of_masks(masks: Sequence[Packed]) -> dict[str, Array]:
    """Return the arrays that stand for the masks in a file."""
    sizes = np.array([mask["size"] for mask in masks], np.int64).reshape(-1, 2)
    ends = np.cumsum([len(mask["counts"]) for mask in masks], dtype=np.int64)
    content = np.frombuffer(b"".join(mask["counts"] for mask in masks), np.uint8)
    return {"mask_sizes": sizes, "mask_ends": ends, "mask_bytes": content}


def masks_of_columns(content: Mapping[str, Array], path: object) -> tuple[Packed, ...]:
    """Return the masks of a file; pycocotools would compute with damaged ones without a word."""
    for name, (dtype, dimensions) in COLUMNS.items():
        column = content.get(name)
        if column is None or column.dtype != dtype or column.ndim != dimensions:
            raise DetectionError(f"{path}: {name} is missing or damaged. Make the file again.")
    sizes, ends = content["mask_sizes"], content["mask_ends"].tolist()
    starts = [0, *ends[:-1]]
    text = content["mask_bytes"].tobytes()
    masks = []
    try:
        for size, start, end in zip(sizes.tolist(), starts, ends, strict=True):
            counts = text[start:end]
            if int(unpack_counts(counts.decode("ascii")).sum()) != size[0] * size[1]:
                raise ValueError("a mask does not fill its image")
            masks.append({"size": size, "counts": counts})
        if (ends[-1] if ends else 0) != len(text):
            raise ValueError("there is more than the masks")
    except ValueError as error:
        raise DetectionError(f"{path}: the masks are damaged ({error}). Make it again.") from error
    return tuple(masks)
