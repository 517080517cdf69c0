"""What the numbers support: intervals, and which rows are within noise of the best.

The unit is the pretraining seed. Trials on one backbone tell how noisy an evaluation is, not how
another pretraining would turn out, so they are averaged before anything is compared.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import betainc, stdtr, stdtrit

from kscl.records.spread import std

ALPHA = 0.05
LEVEL = 0.95
# A difference this small beside the values is rounding in the sums, not variance.
ROUNDING = 1e-12

THE_TEST = (
    "Rows are compared within one protocol and metric by Welch's t test, two-sided, with "
    f"pretraining seeds as the units (trials on one backbone are averaged first), at {ALPHA:g}. "
    "Every row's comparisons with all others are corrected by Holm's method, and the larger of a "
    "pair's two corrected p counts. Intervals of differences are widened to match: they exclude 0 "
    "exactly where the test shows a difference. Rank 1 is the row with the best mean, "
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


@dataclass(frozen=True)
class PairTest:
    """Welch's test of two rows, corrected for the comparisons of both with all other rows."""

    p: float
    level: float  # of the interval, such that it excludes 0 exactly if p < ALPHA
    interval: tuple[float, float]  # of the difference of the means

    @property
    def shows(self) -> bool:
        """Return whether a difference is shown."""
        return self.p < ALPHA


@dataclass(frozen=True)
class Pairs:
    """The test of every two groups of replicate values."""

    groups: Sequence[Sequence[float]]
    plain: np.ndarray  # (n, n) p before the correction; nan where a group has a single value
    p: np.ndarray  # (n, n) after it

    def test(self, i: int, j: int) -> PairTest | None:
        """Return the test of group i − group j; None if one of them has a single value."""
        plain, p = float(self.plain[i, j]), float(self.p[i, j])
        level = 1 - ALPHA * plain / p if p else LEVEL
        interval = welch_interval(self.groups[i], self.groups[j], level)
        return None if interval is None else PairTest(p, level, interval)


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
    fraction = min(max(percent / 100, 0.0), 1.0)
    # P(at most `right` are right) is an incomplete beta function, for any n.
    low, high = (
        bisect_left(range(n), part, key=lambda right: betainc(n - right, right + 1, 1 - fraction))
        for part in ((1 - level) / 2, (1 + level) / 2)
    )
    return 100 * low / n, 100 * high / n


def compare_all(groups: Sequence[Sequence[float]]) -> Pairs:
    """Test every two groups; Holm's correction is over all comparisons of a group.

    A pair has two corrected p, one among the comparisons of each group: the larger one counts. So
    the answer for a pair is the same whichever of the two is the reference.
    """
    plain = np.full((len(groups), len(groups)), np.nan)
    p = plain.copy()
    tested = [i for i, group in enumerate(groups) if len(group) > 1]
    if len(tested) > 1:
        found = welch_p([groups[i] for i in tested])
        others = ~np.eye(len(tested), dtype=bool)
        corrected = np.ones_like(found)
        for row, mine, to in zip(corrected, found, others, strict=True):
            row[to] = holm(mine[to])
        plain[np.ix_(tested, tested)] = found
        p[np.ix_(tested, tested)] = np.maximum(corrected, corrected.T)
    return Pairs(groups, plain, p)


def welch_p(groups: Sequence[Sequence[float]]) -> np.ndarray:
    """Return the two-sided p (n, n) of every two groups; all have two or more values."""
    means, errors = _moments(groups)
    parts = errors**2 / (np.array([len(group) for group in groups]) - 1)
    difference, error = means[:, None] - means, errors[:, None] + errors
    scale = np.maximum(np.abs(means)[:, None], np.abs(means))
    exact = error <= (ROUNDING * scale) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        t = difference / np.sqrt(error)
        freedom = error**2 / (parts[:, None] + parts)
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


def standings(
    pairs: Pairs, ranked: Sequence[int] | None = None, lower_is_better: bool = False
) -> list[Standing]:
    """Return one standing per group; `THE_TEST` says it in words.

    Only the groups in `ranked` (indices; all by default) get a rank.
    """
    groups, found = pairs.groups, [UNTESTED] * len(pairs.groups)
    ranked = range(len(groups)) if ranked is None else ranked
    tested = [i for i in ranked if len(groups[i]) > 1]
    if len(tested) < 2:  # nothing to be better than
        return found
    sign = 1 if lower_is_better else -1
    rest = sorted(tested, key=lambda i: sign * float(np.mean(groups[i])))
    against_best = dict.fromkeys(tested, 1.0)
    while rest:
        best, *others = rest
        rank = len(tested) - len(rest) + 1
        if rank == 1:
            against_best |= {i: float(pairs.p[best, i]) for i in others}
            found[best] = Standing("best", 1, None)
        else:
            found[best] = Standing("below the best", rank, against_best[best])
        verdict: Verdict = "not distinguishable" if rank == 1 else "below the best"
        rest = []
        for i in others:
            if pairs.p[best, i] < ALPHA:
                rest.append(i)
            else:
                found[i] = Standing(verdict, rank, against_best[i])
    return found
