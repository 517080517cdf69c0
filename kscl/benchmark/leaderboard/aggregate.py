"""A summary over protocols: each row's mean rank, with an interval by resampling its seeds.

It says less than any of its parts: ranks forget by how much rows differ, protocols count alike, and
rows that miss a protocol are ranked among others. So it is shown apart and ranks nothing. Results
that warnings call unusable are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kscl.benchmark.leaderboard.board import MeanRank, Measure, Row, Section
from kscl.benchmark.leaderboard.statistics import LEVEL
from kscl.benchmark.leaderboard.usable import is_ranked

DRAWS = 2000
SEED = 0  # equal records give equal intervals
MAX_ROWS = 300  # more rows have no summary: nobody reads it, and it takes long

WHAT_IT_IS = (
    "A summary, not a ranking: the mean over protocols of a row's rank by its mean (1 is best), "
    "among the rows that were measured under each. A protocol under which a row was not measured "
    "is left out for it, so rows with other protocols are not comparable. The 95 % interval is a "
    "percentile bootstrap over pretraining seeds; without several seeds there is none."
)


def mean_ranks(rows: Sequence[Row], sections: Sequence[Section]) -> list[MeanRank]:
    """Return the rows with a rank: those with the most protocols first, then by their mean.

    Empty unless two protocols rank two rows each.
    """
    sections = [section for section in sections if len(_ranked(section)) > 1]
    if len(sections) < 2 or len(rows) > MAX_ROWS:
        return []
    chance = np.random.default_rng(SEED)
    picks: dict[tuple[int, tuple[str, ...]], np.ndarray] = {}  # of the seeds of a row
    plain: dict[int, list[float]] = {}
    drawn: dict[int, list[np.ndarray]] = {}
    for section in sections:
        ranked = _ranked(section)
        measures = [_measure(section, row) for row in ranked]
        means = []
        for row, measure in zip(ranked, measures, strict=True):
            # The same seeds are drawn under every protocol that has them: they are the units.
            key, count = (id(row), measure.replicates), len(measure.values)
            if key not in picks:
                picks[key] = chance.integers(count, size=(DRAWS, count))
            means.append(np.asarray(measure.values)[picks[key]].mean(axis=1))
        sign = -1 if section.protocol.lower_is_better else 1
        ranks = _ranks(sign * np.array([[measure.mean for measure in measures]]))[0]
        redrawn = _ranks(sign * np.stack(means, axis=1))
        for i, row in enumerate(ranked):
            plain.setdefault(id(row), []).append(float(ranks[i]))
            drawn.setdefault(id(row), []).append(redrawn[:, i])
    found = []
    for row in rows:
        if id(row) not in plain:
            continue
        of_row = plain[id(row)]
        interval = _interval(row, np.mean(drawn[id(row)], axis=0))
        found.append(MeanRank(row, float(np.mean(of_row)), len(of_row), interval))
    return sorted(found, key=lambda it: (-it.protocols, it.mean))


def _ranked(section: Section) -> list[Row]:
    return [row for row in section.rows if is_ranked(row, section.protocol)]


def _measure(section: Section, row: Row) -> Measure:
    return row.results[section.protocol].measures[section.protocol.headline]


def _ranks(means: np.ndarray) -> np.ndarray:
    """Return ranks (draws, rows), highest first; equal means share the mean of their ranks."""
    from scipy.stats import rankdata  # takes half a second to import, and few boards need it

    ranks: np.ndarray = rankdata(-means, axis=1)
    return ranks


def _interval(row: Row, means: np.ndarray) -> tuple[float, float] | None:
    if not any(result.n_pretrain > 1 for result in row.results.values()):
        return None
    low, high = np.percentile(means, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(low), float(high)
