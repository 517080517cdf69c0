"""Random numbers and angles that are the same to the last bit on every machine.

The data set is promised byte for byte, so everything drawn from here on uses only what IEEE 754
rounds exactly (+ - * / sqrt, floor, comparisons, one array operation at a time). Sines, powers,
float sums and matrix products are left out: their last bit depends on the C library, the SIMD path
or the BLAS. `numpy.random.Generator` is left out too, since its methods may change between numpy
releases; the raw output of its bit generators may not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

# Always float32; numpy's type stubs lose that as soon as a Python float comes in.
Field = NDArray[np.floating[Any]]
Item = TypeVar("Item")

_ANGLES = 4096
# Rounded to 2^-16, a last-bit difference between two C libraries disappears.
_COSINES = [round(math.cos(2 * math.pi * k / _ANGLES) * 65536) / 65536 for k in range(_ANGLES)]


class Chance:
    """The random stream of one picture, a pure function of its key.

    Every part of the key has to fit into 32 bits: longer ones would run into their neighbors.
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

    def sign(self) -> float:
        return 1.0 if self.happens(0.5) else -1.0

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
