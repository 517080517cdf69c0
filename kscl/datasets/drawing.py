"""Draw one picture of the data set: a lit, textured form among clutter, or a crowded scene.

The data set must be the same to the byte everywhere, so drawing uses only operations that IEEE 754
rounds exactly (+ - * / sqrt, floor, comparisons, one array operation at a time). The last bit of
sines, powers, float sums and matrix products depends on the C library, SIMD path or BLAS. Methods
of `numpy.random.Generator` may change between releases; the raw output of bit generators may not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

# Always float32; numpy's type stubs lose that as soon as a Python float comes in.
Field = NDArray[np.floating[Any]]
Picture = NDArray[np.uint8]  # (H, W, 3)
Pixels = NDArray[np.bool_]  # (H, W)
Box = tuple[float, float, float, float]  # left, top, right, bottom
Item = TypeVar("Item")

_ANGLES = 4096
# Rounded to 2^-16, a last-bit difference between two C libraries disappears.
_COSINES = [round(math.cos(2 * math.pi * k / _ANGLES) * 65536) / 65536 for k in range(_ANGLES)]


class Chance:
    """The random stream of one picture, a pure function of its key.

    Every part of the key must fit into 32 bits: longer ones would run into their neighbors.
    """

    def __init__(self, seed: int, stream: int, index: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence((seed, stream, index)))

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        return low + (high - low) * ((self._bits.random_raw() >> 11) * 2.0**-53)

    def integer(self, low: int, high: int) -> int:
        """Draw an integer from low to high, both included."""
        return low + int(self.uniform() * (high - low + 1))

    def happens(self, probability: float) -> bool:
        return self.uniform() < probability

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        left = list(items)
        return [left.pop(self.integer(0, len(left) - 1)) for _ in items]

    def bytes(self, *shape: int) -> NDArray[np.uint8]:
        count = math.prod(shape)
        words = self._bits.random_raw(-(-count // 8))
        return words.astype("<u8").view(np.uint8)[:count].reshape(shape)

    def field(self, *shape: int) -> Field:
        """Draw independent values in [0, 1] in steps of 1/255."""
        return self.bytes(*shape).astype(np.float32) / np.float32(255)


def cos_sin(turn: float) -> tuple[float, float]:
    """Return cosine and sine of a fraction of a full turn, to the nearest of 4,096 directions."""
    step = math.floor(turn * _ANGLES + 0.5)
    return _COSINES[step % _ANGLES], _COSINES[(step - _ANGLES // 4) % _ANGLES]


def smooth(values: Field) -> Field:
    """Return the S-curve 3t² − 2t³ of values in [0, 1]."""
    return values * values * (3 - 2 * values)


# The five forms, each as a table of signed distances to its outline. A distance gives everything
# that drawing needs: the anti-aliased edge, the soft shadow, the rounded rim.

Outline = list[tuple[float, float]]
AREA = 1.9  # of every form, so that brightness does not give the form away
ROUNDING = 0.05
REACH = 1.75  # of the tables from the center, in radii; no outline comes near
_CELLS = 224


def _star() -> Outline:
    corners = [((1.0, 0.46)[k % 2], cos_sin(k / 10 - 0.25)) for k in range(10)]
    return [(r * c, r * s) for r, (c, s) in corners]


def _heart() -> Outline:
    points = []
    for k in range(48):
        if 0 < abs(k - 24) < 4:
            continue  # a rounded rim would turn the curve's needle-sharp tip into a knob
        s = cos_sin(k / 48)[1]
        c1, c2, c3, c4 = (cos_sin(n * k / 48)[0] for n in (1, 2, 3, 4))
        points.append((s * s * s, -(13 * c1 - 5 * c2 - 2 * c3 - c4) / 16))
    return points


def _cross() -> Outline:
    return [
        (x * c - y * s, x * s + y * c)
        for c, s in (cos_sin(quarter / 4) for quarter in range(4))
        for x, y in [(1.0, -0.36), (1.0, 0.36), (0.36, 0.36)]
    ]


_OUTLINES: dict[str, Callable[[], Outline]] = {
    "star": _star,
    "heart": _heart,
    "cross": _cross,
    "triangle": lambda: [cos_sin(k / 3 - 0.25) for k in range(3)],
    "disc": lambda: [cos_sin(k / 48) for k in range(48)],
}


@cache
def outline_of(form: str) -> Outline:
    """Return the outline around its center of mass, scaled to the common area."""
    outline = _OUTLINES[form]()
    area = center_x = center_y = 0.0
    for (x0, y0), (x1, y1) in zip(outline, outline[1:] + outline[:1], strict=True):
        twist = x0 * y1 - x1 * y0
        area += twist / 2
        center_x += (x0 + x1) * twist / 6
        center_y += (y0 + y1) * twist / 6
    scale = math.sqrt(AREA / abs(area))
    return [((x - center_x / area) * scale, (y - center_y / area) * scale) for x, y in outline]


@cache
def distance_table(form: str) -> Field:
    """Return signed distances (inside negative) on a square grid over [-REACH, REACH]²."""
    outline = outline_of(form)
    steps = np.arange(_CELLS) * (2 * REACH / (_CELLS - 1)) - REACH
    x, y = steps[None, :], steps[:, None]
    nearest = np.full((_CELLS, _CELLS), np.inf)
    inside = np.zeros((_CELLS, _CELLS), dtype=bool)
    for (x0, y0), (x1, y1) in zip(outline, outline[1:] + outline[:1], strict=True):
        dx, dy = x1 - x0, y1 - y0
        along = np.clip(((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy), 0, 1)
        off_x, off_y = x - x0 - along * dx, y - y0 - along * dy
        nearest = np.minimum(nearest, off_x * off_x + off_y * off_y)
        if dy != 0:
            inside ^= ((y0 > y) != (y1 > y)) & (x < x0 + (y - y0) * (dx / dy))
    distance = np.sqrt(nearest)
    return (np.where(inside, -distance, distance) - ROUNDING).astype(np.float32)


def signed_distance(form: str, u: Field, v: Field) -> Field:
    """Interpolate the distance to the outline at the points (u, v), in radii."""
    per_radius = (_CELLS - 1) / (2 * REACH)
    column = np.clip((u + REACH) * per_radius, 0, _CELLS - 1.001)
    row = np.clip((v + REACH) * per_radius, 0, _CELLS - 1.001)
    left, top = np.floor(column), np.floor(row)
    corner = (top * _CELLS + left).astype(np.int32)
    corners = (corner, corner + 1, corner + _CELLS, corner + _CELLS + 1)
    return _interpolated(distance_table(form).ravel(), corners, column - left, row - top)


def _interpolated(values: Field, corners: Sequence[Any], across: Field, down: Field) -> Field:
    """Blend the values at the four corners (upper left and right, lower left and right)."""
    upper = values[corners[0]]
    upper += (values[corners[1]] - upper) * across
    lower = values[corners[2]]
    lower += (values[corners[3]] - lower) * across
    return upper + (lower - upper) * down


# The five textures: how much of the second color shows at a point. Each takes the object's own
# coordinates in radii, the width of a pixel there (edges are softened over it) and the random
# stream; each shows the second color on about half of the surface.


def _edge(inside: Field, pixel: float) -> Field:
    """Return coverage, soft over one pixel, from a signed distance."""
    return np.clip(inside / pixel + 0.5, 0, 1)


def _bars(x: Field, period: float, pixel: float) -> Field:
    """Return bars across x that take half of each period."""
    phase = x / period
    phase -= np.floor(phase)
    return _edge((0.25 - np.abs(phase - 0.5)) * period, pixel)


def _laid(u: Field, v: Field, chance: Chance) -> tuple[Field, Field]:
    """Turn, bend and shift the coordinates at random, as cloth is laid over the object."""
    cosine, sine = cos_sin(0.125 + chance.uniform(-0.06, 0.06))
    shift_x, shift_y = chance.uniform(), chance.uniform()
    bend = chance.uniform(-0.12, 0.12)
    x = u * cosine - v * sine
    y = u * sine + v * cosine
    return x + bend * y * y + shift_x, y + shift_y


def _striped(u: Field, v: Field, pixel: float, chance: Chance) -> Field:
    x, _ = _laid(u, v, chance)
    return _bars(x, chance.uniform(0.3, 0.36), pixel)


def _dotted(u: Field, v: Field, pixel: float, chance: Chance) -> Field:
    x, y = _laid(u, v, chance)
    period = chance.uniform(0.48, 0.56)
    x, y = x / period, y / period
    row = np.floor(y)
    x = x + row * 0.5
    x, y = x - np.floor(x) - 0.5, y - row - 0.5
    return _edge((0.36 - np.sqrt(x * x + y * y)) * period, pixel)


def _checkered(u: Field, v: Field, pixel: float, chance: Chance) -> Field:
    x, y = _laid(u, v, chance)
    period = chance.uniform(0.8, 0.95)
    one, other = _bars(x, period, pixel), _bars(y, period, pixel)
    return one + other - 2 * one * other


def _ringed(u: Field, v: Field, pixel: float, chance: Chance) -> Field:
    x = u - chance.uniform(-0.15, 0.15)
    y = v - chance.uniform(-0.15, 0.15)
    radius = np.sqrt(x * x + y * y) + chance.uniform()
    return _bars(radius, chance.uniform(0.5, 0.6), pixel)


def _mottled(u: Field, v: Field, pixel: float, chance: Chance) -> Field:
    x, y = _laid(u, v, chance)
    cell = chance.uniform(0.15, 0.19)
    coarse = _noise_at(x / cell, y / cell, chance)
    fine = _noise_at(x * (2.3 / cell), y * (2.3 / cell), chance)
    height = coarse + (fine - 0.5) * 0.4 - 0.5
    return _edge(height * cell, pixel)


def _noise_at(x: Field, y: Field, chance: Chance) -> Field:
    """Return smooth noise in [0, 1] with a random value at each integer (x, y), of period 32."""
    column, row = np.floor(x), np.floor(y)
    left, top = column.astype(np.int32) & 31, (row.astype(np.int32) & 31) * 32
    right, low = (left + 1) & 31, (top + 32) & 1023
    corners = (top + left, top + right, low + left, low + right)
    return _interpolated(chance.field(32 * 32), corners, smooth(x - column), smooth(y - row))


TEXTURES: dict[str, Callable[[Field, Field, float, Chance], Field]] = {
    "striped": _striped,
    "dotted": _dotted,
    "checkered": _checkered,
    "ringed": _ringed,
    "mottled": _mottled,
}


class ShapeClass(NamedTuple):
    """A texture on a form; neither alone decides the class."""

    texture: str
    form: str

    @property
    def name(self) -> str:
        return f"{self.texture}_{self.form}"


# Four rounds of five: each round pairs every form with a different texture.
CLASSES = tuple(
    ShapeClass(list(TEXTURES)[(index + turn) % len(TEXTURES)], form)
    for turn in range(4)
    for index, form in enumerate(_OUTLINES)
)
CLASS_NAMES = tuple(each.name for each in CLASSES)


@dataclass(frozen=True)
class Canvas:
    """A picture being painted."""

    pixels: Field  # (3, H, W), 0 black to 1 white
    owner: NDArray[np.int16]  # (H, W), the object that shows at a pixel, 0 for none
    light: tuple[float, float]  # unit vector in the picture, toward the light


@dataclass(frozen=True)
class Patch:
    """A rectangle around something to paint, and the part of it that is on the canvas."""

    x: Field  # (1, w), pixel centers as seen from the patch's own center
    y: Field  # (h, 1)
    on_canvas: tuple[slice, slice]
    on_patch: tuple[slice, slice]


def patch_around(canvas: Canvas, x: float, y: float, box: Box) -> Patch:
    """Return the pixels of a box that is given as offsets from (x, y)."""
    height, width = canvas.owner.shape
    left, top = math.floor(x + box[0]), math.floor(y + box[1])
    right, bottom = math.ceil(x + box[2]), math.ceil(y + box[3])
    canvas_x = slice(min(max(left, 0), width), min(max(right, 0), width))
    canvas_y = slice(min(max(top, 0), height), min(max(bottom, 0), height))
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
    canvas.pixels[:, *patch.on_canvas] *= 1 - amount[patch.on_patch]


def lay_over(canvas: Canvas, patch: Patch, color: Field, cover: Field, owner: int = 0) -> None:
    """Blend `color` (3, h, w) over the canvas where `cover` (h, w) says so."""
    cover = cover[patch.on_patch]
    below = canvas.pixels[:, *patch.on_canvas]
    below += (color[:, *patch.on_patch] - below) * cover
    canvas.owner[patch.on_canvas][cover >= 0.5] = owner


def random_color(chance: Chance, brightness: float, vividness: float, hues: float = 0.8) -> Field:
    """Draw a color of the given brightness in YIQ, as (3, 1, 1).

    I runs from sky blue to orange, Q (scaled by `hues`) from green to violet. Backdrops and clutter
    stay near the I axis, like skies, soils and rooms.
    """
    blue_to_orange, green_to_violet = cos_sin(chance.uniform())
    i = vividness * blue_to_orange
    q = vividness * green_to_violet * hues
    factors = ((0.956, 0.619), (-0.272, -0.647), (-1.106, 1.703))
    return column(*(min(max(brightness + a * i + b * q, 0.0), 1.0) for a, b in factors))


_DULL = 0.25  # hues of backdrops and clutter


def column(*color: float) -> Field:
    """Return a color as (3, 1, 1), to be multiplied with fields."""
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
    """Paint an out-of-focus backdrop: a wall, maybe a floor, noise at several scales, shadows."""
    brightness = chance.uniform(0.42, 0.56)
    shades = [
        random_color(
            chance, brightness + chance.uniform(-0.1, 0.1), chance.uniform(0, 0.1), hues=_DULL
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


# Clutter that is not annotated: plain strokes and blobs, behind the objects or across them.


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
    color = random_color(chance, chance.uniform(0.15, 0.85), 0.12, _DULL) * shade
    lay_over(canvas, patch, color, np.clip(0.5 - distance, 0, 1))


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
    color = random_color(chance, chance.uniform(0.15, 0.85), 0.12, _DULL) * (1 + light * 0.3)
    lay_over(canvas, patch, color, np.clip(0.5 - distance / blur, 0, 1))


def scatter_behind(canvas: Canvas, count: int, chance: Chance) -> None:
    """Paint strokes and blobs before any object."""
    height, width = canvas.owner.shape
    size = min(width, height)
    for _ in range(count):
        x, y = chance.uniform(0, width), chance.uniform(0, height)
        if chance.happens(0.5):
            length, breadth = chance.uniform(0.08, 0.35) * size, chance.uniform(0.006, 0.025) * size
            paint_stroke(canvas, x, y, length, breadth, chance)
        else:
            paint_blob(canvas, x, y, chance.uniform(0.03, 0.14) * size, chance)


def cross_in_front(canvas: Canvas, count: int, chance: Chance) -> None:
    """Paint thin strokes over everything, so that they hide parts of objects."""
    height, width = canvas.owner.shape
    size = min(width, height)
    for _ in range(count):
        x, y = chance.uniform(0.1, 0.9) * width, chance.uniform(0.1, 0.9) * height
        length, breadth = chance.uniform(0.1, 0.3) * size, chance.uniform(0.008, 0.025) * size
        paint_stroke(canvas, x, y, length, breadth, chance)


_TEXTURE_EDGE = 1.2  # pixels: edges inside a texture are a little softer than the outline


@dataclass(frozen=True)
class Pose:
    """Where an object is and how it is turned."""

    x: float
    y: float
    radius: float  # pixels
    to_own: tuple[float, float, float, float]  # picture offsets (radii) to own coordinates
    tilt: tuple[float, float]  # perspective: how fast the far side shrinks, per radius

    def own_coordinates(self, x: Field, y: Field) -> tuple[Field, Field]:
        a, b, c, d = self.to_own
        depth = 1 + x * self.tilt[0] + y * self.tilt[1]
        return (x * a + y * b) / depth, (x * c + y * d) / depth

    def extent(self, form: str) -> Box:
        """Return the box around the outline as posed, in pixels from the center."""
        a, b, c, d = self.to_own
        area = a * d - b * c
        xs, ys = [], []
        for u, v in outline_of(form):
            x, y = (d * u - b * v) / area, (a * v - c * u) / area
            depth = self.radius / (1 - self.tilt[0] * x - self.tilt[1] * y)
            xs.append(x * depth)
            ys.append(y * depth)
        margin = 2 + 2 * ROUNDING * self.radius
        return min(xs) - margin, min(ys) - margin, max(xs) + margin, max(ys) + margin


def random_pose(x: float, y: float, radius: float, chance: Chance) -> Pose:
    """Draw a pose that a thing on a table can have: turned, seen from the side, tilted."""
    cosine, sine = cos_sin(chance.uniform(-0.06, 0.06))
    tall = chance.uniform(0.85, 1.0)
    wide = 1 / tall
    axis_cosine, axis_sine = cos_sin(chance.uniform())
    # Squeezed along an axis a and stretched across it, the area stays: aaᵀ/s + (1 − aaᵀ)s.
    xx = wide * axis_cosine * axis_cosine + tall * axis_sine * axis_sine
    yy = wide * axis_sine * axis_sine + tall * axis_cosine * axis_cosine
    xy = (wide - tall) * axis_cosine * axis_sine
    to_own = (
        cosine * xx + sine * xy,
        cosine * xy + sine * yy,
        cosine * xy - sine * xx,
        cosine * yy - sine * xy,
    )
    return Pose(x, y, radius, to_own, (chance.uniform(-0.1, 0.1), chance.uniform(-0.1, 0.1)))


def paint_object(
    canvas: Canvas, shape: ShapeClass, pose: Pose, number: int, chance: Chance
) -> tuple[int, int]:
    """Paint the object over everything; return its area in pixels, whole and on the canvas."""
    box = pose.extent(shape.form)
    _cast_shadow(canvas, shape.form, pose, box, chance)
    patch = patch_around(canvas, pose.x, pose.y, box)
    x, y = patch.x / pose.radius, patch.y / pose.radius
    u, v = pose.own_coordinates(x, y)
    distance = signed_distance(shape.form, u, v)
    second = TEXTURES[shape.texture](u, v, _TEXTURE_EDGE / pose.radius, chance)
    # Two colors of any hue, clearly apart in brightness.
    bright, dark = chance.uniform(0.75, 0.92), chance.uniform(0.08, 0.25)
    bright_color = random_color(chance, bright, chance.uniform(0.02, 0.14))
    dark_color = random_color(chance, dark, chance.uniform(0.02, 0.14))
    paint = bright_color + (dark_color - bright_color) * second
    paint *= _light_on(distance, x, y, canvas.light, chance)
    cover = np.clip(0.5 - distance * pose.radius, 0, 1)
    lay_over(canvas, patch, paint, cover, number)
    solid = cover >= 0.5
    return int(np.count_nonzero(solid)), int(np.count_nonzero(solid[patch.on_patch]))


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
    u, v = pose.own_coordinates(patch.x / pose.radius, patch.y / pose.radius)
    depth = smooth(np.clip(0.6 - signed_distance(form, u, v) / softness, 0, 1))
    darken(canvas, patch, depth * chance.uniform(0.25, 0.65))


# An object is difficult if less of it than this fraction shows, or if its box is narrower than this
# fraction of the picture's shorter side.
DIFFICULT_FRACTION = 0.65
DIFFICULT_WIDTH = 0.11
_TRIES = 60


@dataclass(frozen=True)
class SceneObject:
    """One annotated object; the box is 1-based and includes its last pixel, as in VOC."""

    label: int
    box: tuple[int, int, int, int]  # xmin, ymin, xmax, ymax
    truncated: bool
    difficult: bool
    shows: Pixels = field(repr=False)


def draw_portrait(label: int, size: int, chance: Chance) -> Picture:
    """Draw one object that fills about half of a square picture."""
    canvas = new_canvas(size, size, chance)
    scatter_behind(canvas, chance.integer(0, 3), chance)
    radius = chance.uniform(0.3, 0.42) * size
    x, y = (size * chance.uniform(0.43, 0.57) for _ in range(2))
    paint_object(canvas, CLASSES[label], random_pose(x, y, radius, chance), 1, chance)
    cross_in_front(canvas, chance.integer(0, 1), chance)
    return _developed(canvas, chance)


def draw_scene(
    labels: Sequence[int], size: int, chance: Chance
) -> tuple[Picture, tuple[SceneObject, ...]]:
    """Draw a picture with an object for each label; `size` is the shorter side."""
    long_side = size + size // 4
    height, width = chance.shuffled(
        [(size, size), (size, size), (size, long_side), (long_side, size)]
    )[0]
    canvas = new_canvas(height, width, chance)
    scatter_behind(canvas, chance.integer(2, 7), chance)
    poses = _spread(len(labels), height, width, chance)
    painted = [
        (label, number, *paint_object(canvas, CLASSES[label], pose, number, chance))
        for number, (label, pose) in enumerate(zip(labels, poses, strict=True), start=1)
    ]
    cross_in_front(canvas, chance.integer(0, 3), chance)
    objects = (_annotated(canvas, *each) for each in painted)
    return _developed(canvas, chance), tuple(each for each in objects if each is not None)


def _spread(count: int, height: int, width: int, chance: Chance) -> list[Pose]:
    """Spread poses over the picture; some overlap, some cross the border, a few are tiny."""
    size = min(height, width)
    placed: list[Pose] = []
    for _ in range(count):
        tiny, crowding = chance.happens(0.06), chance.happens(0.4)
        radius = size * (chance.uniform(0.035, 0.05) if tiny else chance.uniform(0.09, 0.18))
        for _ in range(_TRIES):
            x = chance.uniform(0.6 * radius, width - 0.6 * radius)
            y = chance.uniform(0.6 * radius, height - 0.6 * radius)
            if all(_apart(x, y, radius, other, crowding) for other in placed):
                break
            radius *= 0.98  # a crowded picture has smaller objects, not hidden ones
        placed.append(random_pose(x, y, radius, chance))
    return placed


def _apart(x: float, y: float, radius: float, other: Pose, crowding: bool) -> bool:
    """Return whether two objects hardly touch or, when crowding, do not cover their centers."""
    gap = 0.75 * max(radius, other.radius) if crowding else 0.9 * (radius + other.radius)
    return (x - other.x) * (x - other.x) + (y - other.y) * (y - other.y) >= gap * gap


def _annotated(
    canvas: Canvas, label: int, number: int, whole: int, inside: int
) -> SceneObject | None:
    """Annotate the visible part of an object; return None if it is hidden."""
    shows = canvas.owner == number
    columns, rows = np.flatnonzero(shows.any(axis=0)), np.flatnonzero(shows.any(axis=1))
    if columns.size < 2 or rows.size < 2:
        return None
    left, right = int(columns[0]), int(columns[-1])
    top, bottom = int(rows[0]), int(rows[-1])
    narrow = DIFFICULT_WIDTH * min(shows.shape)
    small = min(right - left, bottom - top) + 1 < narrow
    difficult = small or int(np.count_nonzero(shows)) < DIFFICULT_FRACTION * whole
    box = (left + 1, top + 1, right + 1, bottom + 1)
    return SceneObject(label, box, truncated=inside < whole, difficult=difficult, shows=shows)


def _developed(canvas: Canvas, chance: Chance) -> Picture:
    """Add uneven light, a tint, dark corners and grain; round to 8 bits."""
    height, width = canvas.owner.shape
    light = 1 + ramp(height, width, canvas.light) * chance.uniform(0, 0.25)
    across, down = ramp(height, width, (1.0, 0.0)), ramp(height, width, (0.0, 1.0))
    light -= (across * across + down * down) * chance.uniform(0, 0.15)
    light *= chance.uniform(0.95, 1.12)
    tint = column(chance.uniform(0.9, 1), chance.uniform(0.9, 1), chance.uniform(0.9, 1))
    grain = chance.bytes(2, 3, height, width).astype(np.float32)
    noise = (grain[0] - grain[1]) * (chance.uniform(0.01, 0.03) / 255)
    pixels = np.clip(canvas.pixels * (light * tint) + noise, 0, 1)
    return np.ascontiguousarray((pixels * 255 + 0.5).astype(np.uint8).transpose(1, 2, 0))
