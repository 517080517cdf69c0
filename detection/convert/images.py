"""The images of a proof: drawn, and prepared as pretraining and as Detectron2 do it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from detectron2.data.detection_utils import convert_PIL_to_numpy
from PIL import Image
from torch import Tensor

IMAGE_SIZE = (107, 133)  # odd, so that paddings and roundings show

Color = tuple[float, ...]


def draw_images(size: tuple[int, int] = IMAGE_SIZE) -> list[Image.Image]:
    """Draw two pictures with structure at several scales and different channels."""
    chance = np.random.default_rng(0)
    height, width = size
    pictures = []
    for _ in range(2):
        coarse = chance.uniform(0, 255, (7, 9, 3)).astype(np.uint8)
        large = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        noisy = np.asarray(large) * (1.0, 0.7, 0.4) + chance.normal(0, 20, (height, width, 3))
        pictures.append(Image.fromarray(noisy.clip(0, 255).astype(np.uint8)))
    return pictures


def normalized(images: list[Image.Image], mean: Color, std: Color) -> Tensor:
    """Normalize as pretraining does: RGB in [0, 1], then mean and std."""
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    scaled = pixels.permute(0, 3, 1, 2).float() / 255  # (B, 3, H, W)
    return (scaled - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


def preprocessed(model: Any, images: list[Image.Image], order: str) -> Tensor:
    """Return the batch as Detectron2 reads, normalizes and pads it."""
    arrays = [convert_PIL_to_numpy(image, order) for image in images]
    inputs = [{"image": torch.from_numpy(array.transpose(2, 0, 1).copy())} for array in arrays]
    return model.preprocess_image(inputs).tensor


def padded(images: Tensor, like: Tensor) -> Tensor:
    """Pad with zeros on the right and below, as Detectron2 does."""
    return F.pad(images, (0, like.shape[3] - images.shape[3], 0, like.shape[2] - images.shape[2]))
