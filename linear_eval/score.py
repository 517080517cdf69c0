"""Scores in percent, and what a probe returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kscl.errors import KsclError
from kscl.records import hits
from kscl.records.record import Metric, Protocol

TOP = 5
LEVEL = 0.95
ACCURACY = (
    Metric("top1", "top-1", headline=True, per_image=True),
    Metric("top5", "top-5", per_image=True),
)


@dataclass(frozen=True)
class Score:
    """The scores of a classifier on n images."""

    metrics: dict[str, float]  # the headline first; top5 if there are more than five classes
    per_class: dict[str, Any]  # top-1 or average precision
    n: int
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)  # Wilson's, at LEVEL
    right: str = ""  # which images are classified correctly (kscl.records.hits)


@dataclass(frozen=True)
class Outcome:
    """A result of a probe."""

    score: Score
    details: dict[str, Any] = field(default_factory=dict)  # for the record
    remark: str = ""  # for the log
    classifier: tuple[Tensor, Tensor] | None = None  # weight (C, D), bias (C,), on raw features
    part: str = ""  # prefix of the record's file in a run with several
    protocol: Protocol | None = None  # if it differs from the run's
    seed: int | None = None  # if it differs from the run's


def ranked_classes(logits: Tensor) -> Tensor:
    """Return the top classes (N, at most 5) of logits (N, C), best first."""
    if not torch.isfinite(logits).all():
        raise KsclError(
            "The classifier's outputs are not finite: training diverged. Lower the learning rate."
        )
    return logits.topk(min(TOP, logits.shape[1]), dim=1).indices


def score(ranked: Tensor, labels: Tensor, classes: Sequence[str]) -> Score:
    """Score the predicted classes of each image, (N, 1 or more), best first."""
    hit = ranked == labels[:, None]  # (N, k)
    correct = {"top1": hit[:, 0]}
    if ranked.shape[1] == TOP and len(classes) > TOP:
        correct["top5"] = hit.any(1)
    n = len(labels)
    totals = torch.bincount(labels, minlength=len(classes))
    found = torch.bincount(labels[correct["top1"]], minlength=len(classes))
    return Score(
        {name: 100 * int(right.sum()) / n for name, right in correct.items()},
        {
            name: 100 * int(found[number]) / int(totals[number])
            for number, name in enumerate(classes)
        },
        n,
        {name: wilson_interval(int(right.sum()), n) for name, right in correct.items()},
        hits.to_text(correct["top1"].numpy()),
    )


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Return Wilson's interval in percent, valid for small n and near 0 and 100."""
    from scipy.stats import binomtest  # slow to import

    interval = binomtest(successes, n).proportion_ci(LEVEL, method="wilson")
    return 100 * float(interval.low), 100 * float(interval.high)


def beside_end(place: int, count: int) -> int | None:
    """Return what is next to an end of a grid; None if `place` is none, or all places are ends."""
    return {0: 1, count - 1: count - 2}.get(place) if count > 2 else None


def beyond_noise(differences: np.ndarray) -> bool:
    """Return whether differences (n,) on the same images or folds are clearly above 0.

    The mean must exceed the half-width of Student's interval at LEVEL.
    """
    from scipy.special import stdtrit

    n = len(differences)
    if n < 2:
        return False
    error = differences.std(ddof=1) / np.sqrt(n)
    return bool(differences.mean() > stdtrit(n - 1, (1 + LEVEL) / 2) * error)


def average_precision(right: np.ndarray, scores: np.ndarray) -> float:
    """Return the area under the steps of precision over recall, as scikit-learn defines it."""
    recall, precision, _ = _curve(right, scores)
    return float(np.diff(recall, prepend=0) @ precision)


def interpolated_precision(right: np.ndarray, scores: np.ndarray) -> float:
    """Return the area under the best precision at this or a higher recall (VOC 2010)."""
    recall, _, highest = _curve(right, scores)
    return float(np.diff(recall, prepend=0) @ highest)


def eleven_point_precision(right: np.ndarray, scores: np.ndarray) -> float:
    """Return the mean of the best precision at a recall of at least 0, 0.1, …, 1 (VOC 2007)."""
    recall, _, highest = _curve(right, scores)
    first = np.searchsorted(recall, np.arange(11) / 10 - 1e-12)  # 3/10 may be just below 0.3
    return float(highest[first].mean())


def _curve(right: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return recall, precision and the best precision from there on, by descending score."""
    order = np.argsort(-scores, kind="stable")
    last = np.flatnonzero(np.diff(scores[order], append=-np.inf))  # ties are one point
    found = np.cumsum(right[order])[last]
    precision = found / (last + 1)
    return found / found[-1], precision, np.maximum.accumulate(precision[::-1])[::-1]
