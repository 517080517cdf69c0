"""What a probe on stored features is given: images with their labels, and their features."""

from __future__ import annotations

from typing import NamedTuple

from linear_eval.data.features import Features
from linear_eval.data.images import LabeledImages


class FeatureSets(NamedTuple):
    """The images to train on and to test on, with the features of one backbone."""

    train: LabeledImages
    val: LabeledImages
    train_features: Features
    val_features: Features
