"""Bring uint8 views to the float32 that an encoder takes: the one place where it is done."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
import torch
from torch import Tensor


def normalize(views: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalize uint8 views (…, 3, height, width) to float32, on their device.

    It differs from `normalize_exactly` in the last bit, and pretraining has always used it.
    """
    channels = [1.0 / (255 * s) for s in std], [-m / s for m, s in zip(mean, std, strict=True)]
    scale, shift = (
        torch.tensor(c, dtype=torch.float32, device=views.device).view(-1, 1, 1) for c in channels
    )
    return torch.addcmul(shift, views.to(torch.float32), scale)


def normalize_exactly(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normalize uint8 images (B, 3, H, W) to the very bits of torchvision's ToTensor and Normalize.

    `mean` and `std` are (3, 1, 1). Probes use it, whose protocols are defined by torchvision.
    """
    return images.float().div_(255).sub_(mean).div_(std)


def normalize_planes(
    views: np.ndarray, mean: Sequence[float], std: Sequence[float], out: np.ndarray
) -> None:
    """Normalize uint8 (count, 3, height, width) into float32 `out`, on one core.

    One pass over the bytes, where torch takes one to convert and one to scale: 1.9 times as fast as
    `normalize`.
    """
    for view, target in zip(views, out, strict=True):
        for plane, m, s, result in zip(view, mean, std, target, strict=True):
            cv2.addWeighted(plane, 1 / (255 * s), plane, 0.0, -m / s, dst=result, dtype=cv2.CV_32F)
