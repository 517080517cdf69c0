"""Random numbers by address instead of by history.

Every number is a pure function of (seed, epoch, purpose, item): a counter-based generator is
set to that address and read. No state is carried, so nothing depends on the number of workers or
ranks, or on where a run was resumed. Only the raw bit stream is used, which NumPy keeps stable
between versions; its distributions are not promised to be.
"""

from __future__ import annotations

import numpy as np

# The purposes: streams that must never share a number.
ORDER, VIEWS, REPLACEMENT, PROBE = range(4)

_WORD = (1 << 64) - 1


def random_words(seed: int, epoch: int, purpose: int, item: int, count: int) -> np.ndarray:
    """`count` random 64-bit words (uint64)."""
    key = np.array([seed & _WORD, epoch], np.uint64)
    # The lowest counter word is the one the generator itself counts up.
    counter = np.array([0, 0, item, purpose], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def uniforms(seed: int, epoch: int, purpose: int, item: int, count: int) -> np.ndarray:
    """`count` numbers from [0, 1), float64."""
    return (random_words(seed, epoch, purpose, item, count) >> np.uint64(11)) * 2.0**-53


def permutation(seed: int, epoch: int, purpose: int, count: int) -> np.ndarray:
    """The numbers 0 … count - 1 in random order, int64."""
    return np.argsort(random_words(seed, epoch, purpose, 0, count), kind="stable")
