"""Scores of a classifier on a test set, in percent, with what a reader needs to trust them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kscl.records import hits
from linear_eval.errors import LinearEvalError

TOP = 5
LEVEL = 0.95


@dataclass(frozen=True)
class Score:
    """What is reported of a classifier."""

    metrics: dict[str, float]  # top1, and top5 if there are more than five classes
    intervals: dict[str, tuple[float, float]]  # Wilson's, at LEVEL
    per_class: dict[str, float]  # top-1 of the images of each class
    n: int
    right: str  # which of the n images have their own class first (kscl.records.hits)


def ranked_classes(logits: Tensor) -> Tensor:
    """Return the best classes (N, at most 5) of logits (N, C), the best first."""
    if not torch.isfinite(logits).all():
        raise LinearEvalError(
            "The classifier's outputs are not finite: training diverged. Lower the learning rate."
        )
    return logits.topk(min(TOP, logits.shape[1]), dim=1).indices


def score(ranked: Tensor, labels: Tensor, classes: Sequence[str]) -> Score:
    """Score the classes predicted for each image (N, 1 or more), the best first."""
    hit = ranked == labels[:, None]  # (N, k)
    correct = {"top1": hit[:, 0]}
    if ranked.shape[1] == TOP and len(classes) > TOP:  # with five or fewer classes it says nothing
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


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Return Wilson's interval in percent, which holds for small n and near 0 and 100 too."""
    from scipy.stats import binomtest  # takes half a second to import, and is needed at the end

    interval = binomtest(successes, n).proportion_ci(LEVEL, method="wilson")
    return 100 * float(interval.low), 100 * float(interval.high)
