"""Random numbers by address instead of by history.

Every number is a pure function of (seed, epoch, stream, item): a counter-based generator is set to
that address and read. No state is carried, so nothing depends on the number of workers or ranks, or
on where a run was resumed. Only the raw bit stream is used, which NumPy keeps stable between
versions; its distributions are not promised to be.
"""

from __future__ import annotations

import enum

import numpy as np

_WORD = (1 << 64) - 1


class Stream(enum.IntEnum):
    """What numbers are drawn for: streams never share a number, and ids never change."""

    # pretraining; a probe's epochs draw from the first two as well
    ORDER = 0  # of the images in an epoch
    VIEWS = 1  # crops, flips and colors of an image in an epoch
    REPLACEMENT = 2  # the images that take the place of unreadable ones
    PROBE = 3  # the images that are read first, to see whether any can be read
    MORE_QUERIES = 4  # crops, flips and colors of an image's second query and the next
    SMALL_QUERIES = 5  # those of its small queries
    BUFFER = 6  # how far an image of a remote shard moves in an epoch
    # linear evaluation
    HELD_OUT = 16  # the training images on which a grid's best point is chosen
    FEW_SHOT = 17  # the images per class of a low-shot probe
    CALIBRATION = 18  # the images that BatchNorm is calibrated on
    VIEW_OF_EPOCH = 19  # which of its fixed views an image shows in an epoch
    FIXED_CROPS = 20  # the random crops that are the same in every run
    LOW_SHOT = 21  # the images that a low-shot SVM is trained on
    BOOTSTRAP = 22  # the images of val that a draw of the bootstrap counts
    # every evaluation
    LABELED = 32  # the labeled images of a fraction


def random_words(seed: int, epoch: int, stream: Stream, item: int, count: int) -> np.ndarray:
    """Return `count` random 64-bit words (uint64)."""
    key = np.array([seed & _WORD, epoch], np.uint64)
    # The lowest counter word is the one the generator itself counts up.
    counter = np.array([0, 0, item, stream], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def uniforms(seed: int, epoch: int, stream: Stream, item: int, count: int) -> np.ndarray:
    """Return `count` numbers from [0, 1), float64."""
    return (random_words(seed, epoch, stream, item, count) >> np.uint64(11)) * 2.0**-53


def permutation(seed: int, epoch: int, stream: Stream, count: int) -> np.ndarray:
    """Return the numbers 0 … count - 1 in random order, int64."""
    return np.argsort(random_words(seed, epoch, stream, 0, count), kind="stable")
