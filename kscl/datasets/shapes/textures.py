"""The five textures: how much of the second color shows at a point of an object.

Each takes the object's own coordinates in radii, the width of a pixel there (edges are softened
over it) and its random stream; each is the second color over about half of the surface.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kscl.datasets.shapes.chance import Chance, Field, cos_sin, smooth

Texture = Callable[[Field, Field, float, Chance], Field]


def _edge(inside: Field, pixel: float) -> Field:
    """Turn a signed distance into coverage, soft over one pixel."""
    return np.clip(inside / pixel + 0.5, 0, 1)


def _bars(x: Field, period: float, pixel: float, fraction: float = 0.5) -> Field:
    """Return bars across x that take the given fraction of each period."""
    phase = x / period
    phase -= np.floor(phase)
    return _edge((fraction / 2 - np.abs(phase - 0.5)) * period, pixel)


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
    values = chance.field(32 * 32)
    column, row = np.floor(x), np.floor(y)
    across, down = smooth(x - column), smooth(y - row)
    left, top = column.astype(np.int32) & 31, (row.astype(np.int32) & 31) * 32
    right, low = (left + 1) & 31, (top + 32) & 1023
    upper = values[top + left]
    upper += (values[top + right] - upper) * across
    lower = values[low + left]
    lower += (values[low + right] - lower) * across
    return upper + (lower - upper) * down


TEXTURES: dict[str, Texture] = {
    "striped": _striped,
    "dotted": _dotted,
    "checkered": _checkered,
    "ringed": _ringed,
    "mottled": _mottled,
}
