"""Everything random in a probe, each a pure function of the seed (see `kscl.rng`)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kscl.rng import ORDER, permutation, random_words

# Streams of our own, beyond those that kscl.rng names.
HELD_OUT, FEW_SHOT, CALIBRATION, VIEW = range(16, 20)


def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order in which an epoch goes through `count` images."""
    return permutation(seed, epoch, ORDER, count)


def views_of_epoch(seed: int, epoch: int, count: int, num_views: int) -> np.ndarray:
    """Which of its fixed views each of `count` images shows in this epoch."""
    return (random_words(seed, epoch, VIEW, 0, count) % np.uint64(num_views)).astype(np.int64)


def hold_out(labels: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (kept, held out), both rising: `share` of each class, and at least one of two."""
    held = np.zeros(len(labels), bool)
    for images in _shuffled_classes(labels, seed, HELD_OUT):
        count = min(max(1, round(share * len(images))), len(images) - 1)
        held[images[:count]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def few_of_each_class(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """`count` images of each class, in rising order; all of a class that has no more."""
    chosen = [images[:count] for images in _shuffled_classes(labels, seed, FEW_SHOT)]
    return np.sort(np.concatenate(chosen))


def calibration_images(seed: int, available: int, wanted: int) -> np.ndarray:
    return permutation(seed, 0, CALIBRATION, available)[:wanted]


def new_head(classes: int, features: int, std: float, seed: int) -> tuple[Tensor, Tensor]:
    """Weight (C, D) from N(0, std²), bias (C,) of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.empty(classes, features).normal_(0, std, generator=generator)
    return weight, torch.zeros(classes)


def _shuffled_classes(labels: np.ndarray, seed: int, purpose: int) -> list[np.ndarray]:
    order = permutation(seed, 0, purpose, len(labels))
    return [order[labels[order] == number] for number in np.unique(labels)]
