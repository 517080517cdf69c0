"""What the numbers support: intervals, and which rows are within noise of the best.

The unit is the pretraining seed. Trials on one backbone tell how noisy an evaluation is, not how
another pretraining would turn out, so they are averaged before anything is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtr, stdtrit

from kscl.records.spread import std

ALPHA = 0.05
LEVEL = 0.95
# A difference this small beside the values is rounding in the sums, not variance.
ROUNDING = 1e-12

THE_TEST = (
    "Rows are compared within one protocol and metric by Welch's t test, two-sided, with "
    "pretraining seeds as the units (trials on one backbone are averaged first) and Holm's "
    f"correction over the rows, at {ALPHA:g}. Rank 1 is the row with the highest mean, "
    "and every row that this test cannot tell from it (not distinguishable); the ranks below are "
    "made in the same way from the rows that remain. A row with one pretraining seed takes no "
    "part: it has no rank and is never called different. Published rows are "
    "neither ranked nor tested."
)

Verdict = Literal["best", "not distinguishable", "below the best", "not tested"]


@dataclass(frozen=True)
class Standing:
    """The standing of a row among the rows of its protocol."""

    verdict: Verdict
    rank: int | None
    p: float | None  # Holm-corrected, against the best; None for the best itself


UNTESTED = Standing("not tested", None, None)


def t_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float] | None:
    """Return Student's interval of the mean of several values; None for a single value."""
    return _around_mean(values, 1 / len(values), level) if len(values) else None


def prediction_interval(
    values: Sequence[float], level: float = LEVEL
) -> tuple[float, float] | None:
    """Return the interval in which one more value is expected; None for a single value."""
    return _around_mean(values, 1 + 1 / len(values), level) if len(values) else None


def _around_mean(
    values: Sequence[float], variances: float, level: float
) -> tuple[float, float] | None:
    """Return the mean ± an error whose variance is `variances` times that of the values."""
    spread = std(values)
    if spread is None:
        return None
    mean = float(np.mean(values))
    half = float(stdtrit(len(values) - 1, (1 + level) / 2)) * spread * variances**0.5
    return mean - half, mean + half


def bootstrap_interval(percent: float, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Return the percentile bootstrap of an accuracy over n test images, without drawing.

    Resampling n right or wrong answers gives a binomial count, so its percentiles are exact.
    """
    from scipy.stats import binom  # takes half a second to import, and few boards need it

    fraction = min(max(percent / 100, 0.0), 1.0)
    low, high = binom.ppf([(1 - level) / 2, (1 + level) / 2], n, fraction)
    return 100 * float(low) / n, 100 * float(high) / n


def welch_p(one: Sequence[float], others: Sequence[Sequence[float]]) -> np.ndarray:
    """Return the two-sided p of one group against each other one; all have two or more values."""
    mean, mean_error = _moments([one])
    means, errors = _moments(others)
    difference, error = means - mean, errors + mean_error
    sizes = np.array([len(group) for group in others])
    scale = np.maximum(np.abs(means), np.abs(mean))
    exact = error <= (ROUNDING * scale) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        t = difference / np.sqrt(error)
        freedom = error**2 / (errors**2 / (sizes - 1) + mean_error**2 / (len(one) - 1))
        p = 2 * stdtr(freedom, -np.abs(t))
    # No spread at all on either side: equal is equal, and anything else is a difference.
    return np.where(exact, np.where(np.abs(difference) <= ROUNDING * scale, 1.0, 0.0), p)


def welch_interval(
    one: Sequence[float], other: Sequence[float], level: float = LEVEL
) -> tuple[float, float] | None:
    """Return the interval of one mean − the other; None if a group has fewer than two values."""
    if min(len(one), len(other)) < 2:
        return None
    means, errors = _moments([one, other])
    error = float(errors.sum())
    freedom = error**2 / float((errors**2 / (np.array([len(one), len(other)]) - 1)).sum() or 1)
    half = float(stdtrit(freedom, (1 + level) / 2)) * error**0.5 if error > 0 else 0.0
    difference = float(means[0] - means[1])
    return difference - half, difference + half


def _moments(groups: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and squared standard error of every group."""
    means = np.array([np.mean(group) for group in groups])
    errors = np.array([np.var(group, ddof=1) / len(group) for group in groups])
    return means, errors


def holm(p: np.ndarray) -> np.ndarray:
    """Return p after Holm's step-down correction; never smaller than the plain p, never above 1."""
    order = np.argsort(p, kind="stable")
    steps = np.minimum(1.0, (len(p) - np.arange(len(p))) * p[order])
    corrected = np.empty_like(p)
    corrected[order] = np.maximum.accumulate(steps)
    return corrected


def standings(groups: Sequence[Sequence[float]], alpha: float = ALPHA) -> list[Standing]:
    """Return one standing per group of replicate values; `THE_TEST` says it in words."""
    found = [UNTESTED] * len(groups)
    tested = [i for i, group in enumerate(groups) if len(group) > 1]
    if len(tested) < 2:  # nothing to be better than
        return found
    rest = sorted(tested, key=lambda i: -float(np.mean(groups[i])))
    against_best = dict.fromkeys(tested, 1.0)
    while rest:
        best, *others = rest
        rank = len(tested) - len(rest) + 1
        p = holm(welch_p(groups[best], [groups[i] for i in others])) if others else np.empty(0)
        if rank == 1:
            against_best |= zip(others, map(float, p), strict=True)
            found[best] = Standing("best", 1, None)
        else:
            found[best] = Standing("below the best", rank, against_best[best])
        verdict: Verdict = "not distinguishable" if rank == 1 else "below the best"
        rest = []
        for i, p_i in zip(others, p, strict=True):
            if p_i < alpha:
                rest.append(i)
            else:
                found[i] = Standing(verdict, rank, against_best[i])
    return found
