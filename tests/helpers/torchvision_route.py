"""The same sampled views, carried out the way MoCo's users do: torchvision on PIL pictures."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from PIL import Image, ImageFilter
from torchvision.transforms import functional as F

from kscl.views.augment import Step

ON_PIL = {
    "resized_crop": lambda image, box, size: F.resized_crop(image, *box, [size, size]),
    "to_grayscale": lambda image: F.to_grayscale(image, num_output_channels=3),
    "blur": lambda image, sigma: image.filter(ImageFilter.GaussianBlur(radius=sigma)),
    "invert_above": F.solarize,
}


def apply_on_pil(image: Image.Image, steps: Iterable[Step]) -> np.ndarray:
    for step in steps:
        name = step.apply.__name__
        image = ON_PIL.get(name, getattr(F, name, None))(image, *step.arguments)
    return np.asarray(image)
