"""Clutter that is not annotated: plain strokes and blobs, behind the objects or across them."""

from __future__ import annotations

import numpy as np

from kscl.datasets.shapes.canvas import Canvas, column, darken, lay_over, patch_around, random_color
from kscl.datasets.shapes.chance import Chance, cos_sin, smooth


def paint_stroke(
    canvas: Canvas, x: float, y: float, half_length: float, half_width: float, chance: Chance
) -> None:
    """Paint a straight round-ended bar, lit like a twig or a cable."""
    cosine, sine = cos_sin(chance.uniform())
    margin = 2 * half_width + 2  # for the round end and the shadow
    reach_x, reach_y = abs(cosine) * half_length + margin, abs(sine) * half_length + margin
    patch = patch_around(canvas, x, y, (-reach_x, -reach_y, reach_x, reach_y))
    along = np.abs(patch.x * cosine + patch.y * sine) - half_length
    across = patch.y * cosine - patch.x * sine
    beyond = np.maximum(along, 0)
    distance = np.sqrt(beyond * beyond + across * across) - half_width
    darken(canvas, patch, smooth(np.clip(0.5 - distance / (half_width + 1), 0, 1)) * 0.35)
    facing = canvas.light[1] * cosine - canvas.light[0] * sine
    shade = np.clip(1 + across * (0.4 * facing / half_width), 0.6, 1.4)
    color = column(random_color(chance, chance.uniform(0.15, 0.85), 0.12, any_hue=False)) * shade
    lay_over(canvas, patch, color, np.clip(0.5 - distance, 0, 1), owner=0)


def paint_blob(canvas: Canvas, x: float, y: float, radius: float, chance: Chance) -> None:
    """Paint a plain oval, more or less out of focus, lit like a pebble."""
    cosine, sine = cos_sin(chance.uniform())
    squeeze = chance.uniform(0.5, 1)
    blur = chance.uniform(1, 4)
    reach = radius + blur
    patch = patch_around(canvas, x, y, (-reach, -reach, reach, reach))
    along = (patch.x * cosine + patch.y * sine) / radius
    across = (patch.y * cosine - patch.x * sine) / (radius * squeeze)
    distance = (np.sqrt(along * along + across * across) - 1) * radius
    light = (patch.x * canvas.light[0] + patch.y * canvas.light[1]) / radius
    color = column(random_color(chance, chance.uniform(0.15, 0.85), 0.12, any_hue=False)) * (
        1 + light * 0.3
    )
    lay_over(canvas, patch, color, np.clip(0.5 - distance / blur, 0, 1), owner=0)


def scatter_behind(canvas: Canvas, count: int, chance: Chance) -> None:
    """Paint strokes and blobs before any object."""
    size = min(canvas.width, canvas.height)
    for _ in range(count):
        x, y = chance.uniform(0, canvas.width), chance.uniform(0, canvas.height)
        if chance.happens(0.5):
            length, width = chance.uniform(0.08, 0.35) * size, chance.uniform(0.006, 0.025) * size
            paint_stroke(canvas, x, y, length, width, chance)
        else:
            paint_blob(canvas, x, y, chance.uniform(0.03, 0.14) * size, chance)


def cross_in_front(canvas: Canvas, count: int, chance: Chance) -> None:
    """Paint thin strokes over everything, so that they hide parts of objects."""
    size = min(canvas.width, canvas.height)
    for _ in range(count):
        x, y = chance.uniform(0.1, 0.9) * canvas.width, chance.uniform(0.1, 0.9) * canvas.height
        length, width = chance.uniform(0.1, 0.3) * size, chance.uniform(0.008, 0.025) * size
        paint_stroke(canvas, x, y, length, width, chance)
