"""Scores of a classifier on a test set, in percent, with what is needed to trust them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kscl.records import hits
from linear_eval.errors import LinearEvalError

TOP = 5
LEVEL = 0.95
NORMAL_QUANTILE = 1.959963984540054  # of (1 + LEVEL) / 2


@dataclass(frozen=True)
class Score:
    metrics: dict[str, float]  # top1, and top5 where there are more than five classes
    intervals: dict[str, tuple[float, float]]  # Wilson's, at LEVEL
    per_class: dict[str, float]  # top-1 of the images of each class
    n: int
    right: str  # which of the n images have their own class as the best (kscl.records.hits)


def ranked_classes(logits: Tensor) -> Tensor:
    """The best classes (N, at most 5) of logits (N, C), the best first."""
    if not torch.isfinite(logits).all():
        raise LinearEvalError(
            "the classifier's outputs are not finite: training diverged; lower the learning rate"
        )
    return logits.topk(min(TOP, logits.shape[1]), dim=1).indices


def score(ranked: Tensor, labels: Tensor, classes: Sequence[str]) -> Score:
    """Scores of the classes named for each image, the best first (N, 1 or more)."""
    hit = ranked == labels[:, None]  # (N, k)
    correct = {"top1": hit[:, 0]}
    if ranked.shape[1] == TOP and len(classes) > TOP:  # of five or fewer classes it says nothing
        correct["top5"] = hit.any(1)
    n = len(labels)
    totals = torch.bincount(labels, minlength=len(classes))
    found = torch.bincount(labels[correct["top1"]], minlength=len(classes))
    return Score(
        {name: 100 * int(right.sum()) / n for name, right in correct.items()},
        {name: wilson_interval(int(right.sum()), n) for name, right in correct.items()},
        {
            name: 100 * int(found[number]) / int(totals[number])
            for number, name in enumerate(classes)
        },
        n,
        hits.to_text(correct["top1"].numpy()),
    )


def wilson_interval(successes: int, n: int, z: float = NORMAL_QUANTILE) -> tuple[float, float]:
    """In percent; unlike the normal approximation it holds for small n and near 0 and 100."""
    share = successes / n
    middle = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    whole = 1 + z * z / n
    return 100 * max(0.0, (middle - half) / whole), 100 * min(1.0, (middle + half) / whole)


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and the standard deviation of a sample (0 of a single value)."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
