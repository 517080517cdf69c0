"""Everything random in a probe, each a pure function of the seed (see `kscl.rng`)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kscl.rng import Stream, permutation, random_words


def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return the order in which an epoch visits `count` images."""
    return permutation(seed, epoch, Stream.ORDER, count)


def views_of_epoch(seed: int, epoch: int, count: int, num_views: int) -> np.ndarray:
    """Return which of its fixed views each of `count` images shows in this epoch."""
    words = random_words(seed, epoch, Stream.VIEW_OF_EPOCH, 0, count)
    return (words % np.uint64(num_views)).astype(np.int64)


def hold_out(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images (kept, held out), both ascending.

    `fraction` of each class is held out, and at least one image; a class of one image keeps it.
    """
    held = np.zeros(len(labels), bool)
    for images in _shuffled_classes(labels, seed, Stream.HELD_OUT):
        count = min(max(1, round(fraction * len(images))), len(images) - 1)
        held[images[:count]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def few_of_each_class(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return `count` images of each class, ascending; all images of a smaller class."""
    chosen = [images[:count] for images in _shuffled_classes(labels, seed, Stream.FEW_SHOT)]
    return np.sort(np.concatenate(chosen))


def fraction_of_each_class(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Return this fraction of each class, ascending, and at least one image of each."""
    chosen = [
        images[: max(1, round(fraction * len(images)))]
        for images in _shuffled_classes(labels, seed, Stream.FEW_SHOT)
    ]
    return np.sort(np.concatenate(chosen))


def few_of_one_class(
    labels: np.ndarray, label: int, count: int, seed: int, sample: int, number: int, k: int
) -> np.ndarray:
    """Return `count` of the images that have a label; each draw (sample, number, k) by itself."""
    images = np.flatnonzero(labels == label)
    item = (number << 32) + (k << 1) + (label == 1)
    words = random_words(seed, sample, Stream.LOW_SHOT, item, len(images))
    return np.sort(images[np.argsort(words, kind="stable")[:count]])


def calibration_images(seed: int, available: int, wanted: int) -> np.ndarray:
    """Return the images that BatchNorm statistics are taken from."""
    return permutation(seed, 0, Stream.CALIBRATION, available)[:wanted]


def new_head(classes: int, features: int, std: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return a weight (C, D) from N(0, std²) and a bias (C,) of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.empty(classes, features).normal_(0, std, generator=generator)
    return weight, torch.zeros(classes)


def _shuffled_classes(labels: np.ndarray, seed: int, stream: Stream) -> list[np.ndarray]:
    """Return the images of each class in random order."""
    order = permutation(seed, 0, stream, len(labels))
    return [order[labels[order] == number] for number in np.unique(labels)]
