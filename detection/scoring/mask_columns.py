"""Masks as plain arrays: their sizes, and the packed run lengths of all of them in one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from detection.data.masks import Packed
from detection.errors import DetectionError
from kscl.data.annotated.masks import unpack_counts

Array = np.ndarray[Any, Any]

# name in the file: dtype and number of dimensions
COLUMNS: dict[str, tuple[type, int]] = {
    "mask_sizes": (np.int64, 2),  # (N, 2) height, width
    "mask_ends": (np.int64, 1),  # (N,) where each mask ends in `mask_bytes`
    "mask_bytes": (np.uint8, 1),
}


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
