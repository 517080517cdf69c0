"""Bring uint8 views to the float32 that an encoder takes."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
import torch


def normalise(views: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """uint8 views (…, 3, height, width) to float32 as the encoder takes them, on their device."""
    channels = [1.0 / (255 * s) for s in std], [-m / s for m, s in zip(mean, std, strict=True)]
    scale, shift = (
        torch.tensor(c, dtype=torch.float32, device=views.device).view(-1, 1, 1) for c in channels
    )
    return torch.addcmul(shift, views.to(torch.float32), scale)


def normalise_planes(
    views: np.ndarray, mean: Sequence[float], std: Sequence[float], out: np.ndarray
) -> None:
    """The same on one core: (count, 3, height, width) from uint8 to float32."""
    for view, target in zip(views, out, strict=True):
        for plane, m, s, result in zip(view, mean, std, target, strict=True):
            # One pass over the bytes, where torch takes one to convert and one to scale.
            cv2.addWeighted(plane, 1 / (255 * s), plane, 0.0, -m / s, dst=result, dtype=cv2.CV_32F)
