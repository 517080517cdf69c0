"""The protocols' views: torchvision's own operations on PIL images, bit for bit.

Decoding is `kscl.data.decode`: for ordinary files the same pixels as PIL's, and files with an EXIF
orientation stand upright, as they did in pretraining.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from fvcore.common.config import CfgNode
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from kscl.rng import Stream, uniforms
from kscl.views.sample import MOST_DRAWS, sample_crop
from linear_eval.rules import CENTER, FLIP

FIXED_CROP = "crop"  # "crop0", "crop1", …: random crops that are the same in every run
NUM_DRAWS = MOST_DRAWS["random_resized_crop"] + 1


@dataclass(frozen=True)
class Geometry:
    """The sizes and chances that make a view of a picture."""

    size: int
    resize: int
    scale: tuple[float, float]
    ratio: tuple[float, float]
    flip: float
    interpolation: str = "bilinear"

    def center(self, picture: Image.Image) -> Image.Image:
        """Resize the short side and cut out the center."""
        resized = F.resize(picture, self.resize, InterpolationMode(self.interpolation))
        return F.center_crop(resized, [self.size, self.size])

    def random_crop(self, picture: Image.Image, numbers: np.ndarray) -> Image.Image:
        """Cut out a random resized crop, perhaps flipped, by NUM_DRAWS numbers in [0, 1)."""
        draw = iter(numbers.tolist()).__next__
        flipped = draw() < self.flip
        box = sample_crop(picture.height, picture.width, self.scale, self.ratio, draw)
        size, mode = [self.size, self.size], InterpolationMode(self.interpolation)
        view = F.resized_crop(picture, *box, size, mode)
        return F.hflip(view) if flipped else view

    def fixed(self, picture: Image.Image, view: str, image: int) -> Image.Image:
        """Make a view by its name; a fixed crop depends on the image's index and nothing else."""
        if view == CENTER:
            return self.center(picture)
        if view == FLIP:
            return F.hflip(self.center(picture))
        turn = int(view.removeprefix(FIXED_CROP))
        return self.random_crop(picture, uniforms(0, turn, Stream.FIXED_CROPS, image, NUM_DRAWS))

    def augmented(self, picture: Image.Image, seed: int, epoch: int, image: int) -> Image.Image:
        """Make what training sees of an image in an epoch."""
        return self.random_crop(picture, uniforms(seed, epoch, Stream.VIEWS, image, NUM_DRAWS))


def geometry(cfg: CfgNode) -> Geometry:
    """Read the geometry of the views from a config."""
    given = cfg.INPUT
    ranges = tuple(given.SCALE), tuple(given.RATIO)
    return Geometry(given.SIZE, given.RESIZE, *ranges, given.FLIP, given.INTERPOLATION)


def cached_views(cfg: CfgNode) -> list[str]:
    """Return the names of the fixed views that the cached probe trains on."""
    return [*cfg.CACHED.VIEWS, *(f"{FIXED_CROP}{turn}" for turn in range(cfg.CACHED.RANDOM_CROPS))]


def slot(view: str) -> int:
    """Return the number of a fixed view among all that there can be."""
    fixed = {CENTER: 0, FLIP: 1}
    return fixed[view] if view in fixed else len(fixed) + int(view.removeprefix(FIXED_CROP))


def to_bytes(picture: Image.Image) -> Tensor:
    """Return the pixels as (3, H, W), uint8."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)
