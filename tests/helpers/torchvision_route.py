"""The same sampled views, carried out the way MoCo's users do: torchvision on PIL pictures."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageFilter
from torchvision.transforms import functional as F

from kscl.views.sample import Step


def carry_out_on_pil(image: Image.Image, steps: list[Step], size: int) -> np.ndarray:
    for name, value in steps:
        if name == "crop":
            image = F.resized_crop(image, *value, [size, size])
        elif name == "grayscale":
            image = F.to_grayscale(image, num_output_channels=3)
        elif name == "blur":
            image = image.filter(ImageFilter.GaussianBlur(radius=value))
        elif name == "flip":
            image = F.hflip(image)
        elif name == "solarize":
            image = F.solarize(image, value)
        else:
            image = getattr(F, f"adjust_{name}")(image, value)
    return np.asarray(image)
