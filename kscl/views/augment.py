"""One decoded picture in, K + 1 augmented views out, as fast as one core can.

Pictures are uint8 RGB arrays (height, width, 3), or (height, width) once they are gray. What
happens to a view is sampled first (`kscl.views.sample`) and carried out here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cv2
import numpy as np
import torch

from kscl.views.blur import blur
from kscl.views.color import (
    FOLDED_STEPS,
    UNCHANGED,
    apply_fold,
    fold_step,
    solarize,
    to_gray,
)
from kscl.views.hue import shift_hue
from kscl.views.recipes import Op
from kscl.views.sample import Box, Step, draws_per_view, sample_view

_resize = torch.ops.aten._upsample_bilinear2d_aa  # what interpolate(antialias=True) calls


def make_views(
    picture: np.ndarray,
    ops: Sequence[Op],
    size: int,
    numbers: np.ndarray,
    views: np.ndarray,
    whole: tuple[int, int] | None = None,
) -> None:
    """Fill `views` (count, 3, size, size), uint8, from one picture.

    `numbers` holds `draws_per_view(ops)` numbers from [0, 1) for each view; `ops` has its
    defaults written out. Of a picture that was reduced, `whole` is the height and width before:
    crops are sampled as of the whole picture.
    """
    height, width = picture.shape[:2] if whole is None else whole
    rows = numbers.reshape(len(views), -1).tolist()
    sampled = [sample_view(ops, height, width, size, draws) for draws in rows]
    if (height, width) != picture.shape[:2]:
        by = round(height / picture.shape[0])
        sampled = [_reduced(steps, by) for steps in sampled]
    for steps, view in zip(sampled, views, strict=True):
        write_planes(carry_out(picture, steps, size), view)


def sample_boxes(
    ops: Sequence[Op], height: int, width: int, size: int, numbers: np.ndarray
) -> list[Box]:
    """Return the crops that `make_views` makes of a picture with the same arguments.

    A crop of what is a view already, as a second random crop makes, has no pixels to spare.
    """
    rows = numbers.reshape(-1, draws_per_view(ops)).tolist()
    sampled = [sample_view(ops, height, width, size, draws) for draws in rows]
    return [next(value for name, value in steps if name == "crop") for steps in sampled]


def _reduced(steps: Sequence[Step], by: int) -> list[Step]:
    """Return the steps with the first crop, the one of the picture, in the reduced one's pixels.

    So is a blur before it. The crop's ends are rounded to whole pixels: Pillow, which can crop
    between them, takes so much longer that little of the gain would be left.
    """
    index = next(index for index, (name, _) in enumerate(steps) if name == "crop")
    top, left, height, width = steps[index][1]
    ends = [round(end / by) for end in (top, left, top + height, left + width)]
    box = Box(ends[0], ends[1], ends[2] - ends[0], ends[3] - ends[1])
    before = [(name, value / by if name == "blur" else value) for name, value in steps[:index]]
    return [*before, ("crop", box), *steps[index + 1 :]]


def numbers_needed(ops: Sequence[Op], num_views: int) -> int:
    """Return how many random numbers `make_views` takes for one picture."""
    return num_views * draws_per_view(ops)


def carry_out(picture: np.ndarray, steps: Sequence[Step], size: int) -> np.ndarray:
    """Apply the steps of one view in their order, and leave the given picture as it is."""
    fold = UNCHANGED
    for name, value in steps:
        if name in FOLDED_STEPS:
            fold = fold_step(picture, fold, name, value)
            if value > 1:  # may clip, and what is clipped must not come back in a later step
                picture, fold = apply_fold(picture, fold), UNCHANGED
        elif name == "grayscale":
            picture = to_gray(picture)  # commutes with the fold, which knows a channel and its luma
        elif name == "hue" and not fold.luma:
            picture = shift_hue(picture, value)  # commutes with what all channels share
        else:
            picture, fold = apply_fold(picture, fold), UNCHANGED
            picture = _STEPS[name](picture, value, size)
    return apply_fold(picture, fold)


def crop_and_resize(picture: np.ndarray, box: Box, size: int) -> np.ndarray:
    """Resize a crop bilinearly, antialiased when it shrinks, within 0.3 / 255 of PIL.

    2.4 times as fast as torch on a channels-first copy, and 1.4 times where a crop only grows.
    """
    top, left, height, width = box
    crop = picture[top : top + height, left : left + width]
    if height <= size and width <= size:
        return cv2.resize(crop, (size, size))  # nothing to antialias when it only grows
    pixels = torch.from_numpy(np.ascontiguousarray(crop)).view(1, height, width, -1)
    # Channels-last in and out: torch then repacks neither its input nor its output.
    batch = pixels.permute(0, 3, 1, 2)
    if height > size:
        batch = _resize(batch, [size, width], False)  # fewer rows for the dearer pass along them
    batch = _resize(batch, [size, size], False)
    return batch.permute(0, 2, 3, 1).numpy().reshape(size, size, *crop.shape[2:])


def write_planes(picture: np.ndarray, planes: np.ndarray) -> None:
    """Copy a picture into planes (3, height, width), 3.4 times as fast as by a transposed view."""
    if picture.ndim == 2:
        planes[:] = picture
    else:
        cv2.split(picture, list(planes))


_STEPS: dict[str, Callable[[np.ndarray, Any, int], np.ndarray]] = {
    "crop": crop_and_resize,
    "hue": lambda picture, turn, size: shift_hue(picture, turn),
    "blur": lambda picture, sigma, size: blur(picture, sigma),
    "flip": lambda picture, _, size: cv2.flip(picture, 1),
    "solarize": lambda picture, threshold, size: solarize(picture, threshold),
}
