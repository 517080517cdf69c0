"""The picture while it is painted: its colors, its light and its backdrop."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kscl.datasets.shapes.chance import Chance, Field, cos_sin, smooth

Color = tuple[float, float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Canvas:
    """A picture in the making."""

    pixels: Field  # (3, H, W), 0 black to 1 white
    owner: NDArray[np.int16]  # (H, W), the object that shows at a pixel, 0 for none
    light: tuple[float, float]  # unit vector in the picture, toward the light

    @property
    def height(self) -> int:
        return self.owner.shape[0]

    @property
    def width(self) -> int:
        return self.owner.shape[1]


@dataclass(frozen=True)
class Patch:
    """A rectangle around something to paint, and the part of it that is on the canvas."""

    x: Field  # (1, w), pixel centers as seen from the patch's own center
    y: Field  # (h, 1)
    on_canvas: tuple[slice, slice]
    on_patch: tuple[slice, slice]


def patch_around(canvas: Canvas, x: float, y: float, box: Box) -> Patch:
    """Return the pixels of a box that is given as offsets from (x, y)."""
    left, top = math.floor(x + box[0]), math.floor(y + box[1])
    right, bottom = math.ceil(x + box[2]), math.ceil(y + box[3])
    canvas_x = slice(min(max(left, 0), canvas.width), min(max(right, 0), canvas.width))
    canvas_y = slice(min(max(top, 0), canvas.height), min(max(bottom, 0), canvas.height))
    return Patch(
        x=(np.arange(left, right, dtype=np.float32) + (0.5 - x))[None, :],
        y=(np.arange(top, bottom, dtype=np.float32) + (0.5 - y))[:, None],
        on_canvas=(canvas_y, canvas_x),
        on_patch=(
            slice(canvas_y.start - top, canvas_y.stop - top),
            slice(canvas_x.start - left, canvas_x.stop - left),
        ),
    )


def darken(canvas: Canvas, patch: Patch, amount: Field) -> None:
    """Take the fraction `amount` (h, w) of the light away."""
    rows, columns = patch.on_canvas
    canvas.pixels[:, rows, columns] *= 1 - amount[patch.on_patch]


def lay_over(canvas: Canvas, patch: Patch, color: Field, cover: Field, owner: int) -> None:
    """Blend `color` (3, h, w) over the canvas where `cover` (h, w) says so."""
    rows, columns = patch.on_canvas
    patch_rows, patch_columns = patch.on_patch
    cover = cover[patch.on_patch]
    below = canvas.pixels[:, rows, columns]
    below += (color[:, patch_rows, patch_columns] - below) * cover
    canvas.owner[patch.on_canvas][cover >= 0.5] = owner


def random_color(
    chance: Chance, brightness: float, vividness: float, any_hue: bool = True
) -> Color:
    """Draw a color of the given brightness in YIQ.

    I runs from sky blue to orange, Q from green to violet. Backdrops keep near the I axis, where
    the colors of skies, soils and rooms are.
    """
    blue_to_orange, green_to_violet = cos_sin(chance.uniform())
    i = vividness * blue_to_orange
    q = vividness * green_to_violet * (0.8 if any_hue else 0.25)
    return (
        min(max(brightness + 0.956 * i + 0.619 * q, 0.0), 1.0),
        min(max(brightness - 0.272 * i - 0.647 * q, 0.0), 1.0),
        min(max(brightness - 1.106 * i + 1.703 * q, 0.0), 1.0),
    )


def column(color: Color) -> Field:
    """Return the color as (3, 1, 1), to be multiplied with fields."""
    return np.array(color, dtype=np.float32)[:, None, None]


def lattice_noise(height: int, width: int, cells_y: float, cells_x: float, chance: Chance) -> Field:
    """Return smooth noise in [0, 1] with about `cells_y` by `cells_x` independent values."""
    values = chance.field(int(cells_y) + 3, int(cells_x) + 3)
    down = np.arange(height, dtype=np.float32)[:, None] * (cells_y / height) + chance.uniform()
    across = np.arange(width, dtype=np.float32)[None, :] * (cells_x / width) + chance.uniform()
    top, left = down.astype(np.int32)[:, 0], across.astype(np.int32)[0]
    down, across = smooth(down - np.floor(down)), smooth(across - np.floor(across))
    rows = values[top] + (values[top + 1] - values[top]) * down
    return rows[:, left] + (rows[:, left + 1] - rows[:, left]) * across


def ramp(height: int, width: int, direction: tuple[float, float]) -> Field:
    """Return a linear gradient over the picture, from about -1 to 1 along the direction."""
    across = (np.arange(width, dtype=np.float32) + 0.5) * (2 / width) - 1
    down = (np.arange(height, dtype=np.float32) + 0.5) * (2 / height) - 1
    return across[None, :] * direction[0] + down[:, None] * direction[1]


def new_canvas(height: int, width: int, chance: Chance) -> Canvas:
    """Paint a backdrop out of focus: a wall, maybe a floor, noise at several scales, shadows."""
    brightness = chance.uniform(0.42, 0.56)
    shades = [
        column(
            random_color(
                chance,
                brightness + chance.uniform(-0.1, 0.1),
                vividness=chance.uniform(0, 0.1),
                any_hue=False,
            )
        )
        for _ in range(3)
    ]
    mix = ramp(height, width, cos_sin(chance.uniform())) * 0.35 + 0.5
    mix += (lattice_noise(height, width, 2.5, 2.5, chance) - 0.5) * 0.9
    pixels = shades[0] + (shades[1] - shades[0]) * np.clip(mix, 0, 1)
    if chance.happens(0.5):
        tilt = chance.uniform(-0.25, 0.25)
        floor = ramp(height, width, (tilt, 1.0)) - chance.uniform(-0.4, 0.6)
        pixels += (shades[2] - pixels) * smooth(np.clip(floor * chance.uniform(2, 12), 0, 1))
    for cells, depth in ((6, 0.2), (14, 0.1), (36, 0.06)):
        # Stretched noise reads as wood, cloth or grass; even noise as plaster or foliage.
        squeeze = chance.uniform(0.4, 1.0)
        cells_y, cells_x = (
            (cells, cells * squeeze) if chance.happens(0.5) else (cells * squeeze, cells)
        )
        strength = chance.uniform(0.2, 1) * depth
        pixels *= 1 + (lattice_noise(height, width, cells_y, cells_x, chance) - 0.5) * strength * 2
    shadow = smooth(lattice_noise(height, width, 2, 2, chance))
    pixels *= 1 - shadow * chance.uniform(0, 0.3)
    return Canvas(
        pixels=np.ascontiguousarray(pixels, dtype=np.float32),
        owner=np.zeros((height, width), dtype=np.int16),
        light=cos_sin(chance.uniform()),
    )
