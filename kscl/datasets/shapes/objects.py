"""One object of a class: its pose, texture, light, and the shadow it casts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kscl.datasets.shapes.canvas import (
    Box,
    Canvas,
    column,
    darken,
    lay_over,
    patch_around,
    random_color,
)
from kscl.datasets.shapes.chance import Chance, Field, cos_sin, smooth
from kscl.datasets.shapes.classes import ShapeClass
from kscl.datasets.shapes.forms import ROUNDING, outline_of, signed_distance
from kscl.datasets.shapes.textures import TEXTURES

# Width of the edges inside a texture, in pixels: a little softer than the outline.
_TEXTURE_EDGE = 1.2


@dataclass(frozen=True)
class Pose:
    """Where an object is and how it is turned."""

    x: float
    y: float
    radius: float  # pixels
    to_own: tuple[float, float, float, float]  # picture offsets (radii) to own coordinates
    tilt: tuple[float, float]  # perspective: how fast the far side shrinks, per radius


def random_pose(x: float, y: float, radius: float, chance: Chance) -> Pose:
    """Draw a pose that a thing on a table can have: turned, seen from the side, tilted."""
    cosine, sine = cos_sin(chance.uniform(-0.06, 0.06))
    squeeze = chance.uniform(0.85, 1.0)
    axis_cosine, axis_sine = cos_sin(chance.uniform())
    # Squeezed along an axis a and stretched across it, the area stays: aaᵀ/s + (1 − aaᵀ)s.
    wide, tall = 1 / squeeze, squeeze
    xx = wide * axis_cosine * axis_cosine + tall * axis_sine * axis_sine
    yy = wide * axis_sine * axis_sine + tall * axis_cosine * axis_cosine
    xy = (wide - tall) * axis_cosine * axis_sine
    return Pose(
        x=x,
        y=y,
        radius=radius,
        to_own=(
            cosine * xx + sine * xy,
            cosine * xy + sine * yy,
            cosine * xy - sine * xx,
            cosine * yy - sine * xy,
        ),
        tilt=(chance.uniform(-0.1, 0.1), chance.uniform(-0.1, 0.1)),
    )


def paint_object(
    canvas: Canvas, shape: ShapeClass, pose: Pose, number: int, chance: Chance
) -> tuple[int, int]:
    """Paint the object over everything; return its area in pixels, whole and on the canvas."""
    box = _extent(shape.form, pose)
    _cast_shadow(canvas, shape.form, pose, box, chance)
    patch = patch_around(canvas, pose.x, pose.y, box)
    x, y = patch.x / pose.radius, patch.y / pose.radius
    u, v = _own_coordinates(pose, x, y)
    distance = signed_distance(shape.form, u, v)
    paint = _paint(TEXTURES[shape.texture](u, v, _TEXTURE_EDGE / pose.radius, chance), chance)
    paint *= _light_on(distance, x, y, canvas.light, chance)
    cover = np.clip(0.5 - distance * pose.radius, 0, 1)
    lay_over(canvas, patch, paint, cover, number)
    solid = cover >= 0.5
    return int(np.count_nonzero(solid)), int(np.count_nonzero(solid[patch.on_patch]))


def _extent(form: str, pose: Pose) -> Box:
    """Return the box around the outline as posed, in pixels from the pose's center."""
    a, b, c, d = pose.to_own
    area = a * d - b * c
    xs, ys = [], []
    for u, v in outline_of(form):
        x, y = (d * u - b * v) / area, (a * v - c * u) / area
        depth = pose.radius / (1 - pose.tilt[0] * x - pose.tilt[1] * y)
        xs.append(x * depth)
        ys.append(y * depth)
    margin = 2 + 2 * ROUNDING * pose.radius
    return min(xs) - margin, min(ys) - margin, max(xs) + margin, max(ys) + margin


def _own_coordinates(pose: Pose, x: Field, y: Field) -> tuple[Field, Field]:
    a, b, c, d = pose.to_own
    depth = 1 + x * pose.tilt[0] + y * pose.tilt[1]
    return (x * a + y * b) / depth, (x * c + y * d) / depth


def _paint(second: Field, chance: Chance) -> Field:
    """Mix two colors of any hue, clearly apart in brightness, as the texture says."""
    bright = chance.uniform(0.75, 0.92)
    dark = chance.uniform(0.08, 0.25)
    light_color = column(random_color(chance, bright, chance.uniform(0.02, 0.14)))
    dark_color = column(random_color(chance, dark, chance.uniform(0.02, 0.14)))
    return light_color + (dark_color - light_color) * second


def _light_on(
    distance: Field, x: Field, y: Field, light: tuple[float, float], chance: Chance
) -> Field:
    """Return the brightness of a body with a rounded rim, from the distances to its outline."""
    slope_x, slope_y = np.zeros_like(distance), np.zeros_like(distance)
    slope_x[:, 1:-1] = distance[:, 2:] - distance[:, :-2]
    slope_y[1:-1] = distance[2:] - distance[:-2]
    length = np.sqrt(slope_x * slope_x + slope_y * slope_y) + 1e-4
    toward = (slope_x * light[0] + slope_y * light[1]) / length
    rim = np.clip(1 + distance / chance.uniform(0.15, 0.35), 0, 1)
    body = 1 + (x * light[0] + y * light[1]) * chance.uniform(0.05, 0.25)
    return np.clip(body + toward * rim * rim * chance.uniform(0.2, 0.5), 0.2, 1.6)


def _cast_shadow(canvas: Canvas, form: str, pose: Pose, box: Box, chance: Chance) -> None:
    """Darken the ground behind the object, away from the light, by a soft shadow."""
    away = chance.uniform(0.05, 0.3)
    softness = chance.uniform(0.1, 0.45)
    center_x = pose.x - canvas.light[0] * away * pose.radius
    center_y = pose.y - canvas.light[1] * away * pose.radius
    margin = softness * pose.radius
    left, top, right, bottom = box
    grown = (left - margin, top - margin, right + margin, bottom + margin)
    patch = patch_around(canvas, center_x, center_y, grown)
    u, v = _own_coordinates(pose, patch.x / pose.radius, patch.y / pose.radius)
    depth = smooth(np.clip(0.6 - signed_distance(form, u, v) / softness, 0, 1))
    darken(canvas, patch, depth * chance.uniform(0.25, 0.65))
