"""Compare every row with a baseline that a reader names: by how much it differs, and how surely."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from kscl.benchmark.leaderboard.board import (
    Board,
    Measure,
    Result,
    Row,
    Section,
    described,
)
from kscl.benchmark.leaderboard.details import image_count, number, text
from kscl.benchmark.leaderboard.statistics import LEVEL, PairTest, t_interval
from kscl.benchmark.leaderboard.writing import cells
from kscl.benchmark.leaderboard.writing.tables import (
    IDENTITY,
    identity,
    table,
    without_empty_columns,
)
from kscl.benchmark.leaderboard.writing.tables import text as escaped
from kscl.errors import KsclError
from kscl.records import hits
from kscl.records.record import Record

EXPLANATION = (
    "Differences of the means, with 95% intervals. Welch: by Welch's t, with pretraining seeds as "
    "the units, corrected for multiple comparisons as in the ranking: a difference is shown "
    "exactly if this interval excludes 0. The other two are not corrected and decide nothing. By "
    "seed: paired, over the seeds that both rows have; equal seeds make the same random choices as "
    "far as the settings allow. By image: paired over the test images, each with its mean over the "
    "seeds (for AP, a bootstrap over images); this says how far another draw of test images would "
    "move the difference between these backbones, and nothing about another seed."
)
ONE_SEED = "one seed: none"
INTERVALS = ["Welch", "by seed", "by image", "seeds"]  # the columns beside a difference

Interval = tuple[float, float]


@dataclass(frozen=True)
class Difference:
    """The difference of two means with its 95% intervals, each None where it cannot be had."""

    mean: float
    test: PairTest | None  # over seeds, corrected
    by_seed: Interval | None
    by_image: Interval | None
    seeds: tuple[int, int]
    shared: int  # seeds that both have

    @property
    def welch(self) -> Interval | None:
        """Return the corrected interval over seeds."""
        return self.test.interval if self.test else None


def differences(board: Board, baseline: str) -> str:
    """Return one table per protocol, for the metric that ranks its rows.

    The baseline is a method, with what tells it from other rows of that method: kscl@2,K=5,40%.
    """
    parts, is_there = [], False
    for section in board.sections:
        metric = section.protocol.headline
        to = _baseline(section, baseline)
        if to is None:
            continue
        is_there = True
        label = section.label(metric)
        column = escaped(f"{label} − {baseline}'s")
        header = [*IDENTITY, column, *INTERVALS]
        lines = []
        for row in section.rows:
            result = row.results[section.protocol]
            if metric in result.measures and row is not to:
                lines.append([*identity(row), *difference_cells(difference(section, row, to))])
        if lines:
            shown = table(*without_empty_columns(header, lines))
            parts += [f"Under {escaped(cells.section_name(section))}:", shown]
    if not is_there:
        rows = named_rows(board.rows, baseline.partition("@")[0])
        names = list(map(cells.name, rows)) or sorted({row.entry.method for row in board.rows})
        there = "; ".join(names)
        raise KsclError(f"--baseline {baseline}: There is no such row. There are {there}.")
    return "\n\n".join(parts)


def named_rows(rows: list[Row], baseline: str) -> list[Row]:
    """Return the rows that fit a row's key, a method, `kscl@2,K=5` or `random@resnet18`.

    Any words that a row shows may follow the @: of epochs, K, ρ, backbone, width and tag, as in
    `random@8-64 channels`.
    """
    keyed = [row for row in rows if row.entry.key == baseline]
    if keyed:
        return keyed
    method, _, settings = baseline.partition("@")
    wanted = _words(settings)
    return [row for row in rows if row.entry.method == method and wanted <= _settings(row)]


def shortest_name(row: Row, rows: list[Row]) -> str:
    """Return the shortest of a row's names for --baseline that fits no other of these rows."""
    it = row.entry
    width = it.width.replace("–", "-")
    parts = [it.backbone, width, f"{it.backbone},{width}", f"{it.backbone},{width},{row.tag}"]
    names = [it.method, *(f"{it.method}@{part}" for part in parts if part.strip(","))]
    return next((name for name in names if named_rows(rows, name) == [row]), it.key)


def _settings(row: Row) -> set[str]:
    it = row.entry
    numbers = {cells.plain(it.epochs), f"K={cells.plain(it.shots)}", cells.percent(it.rho)}
    return numbers | _words(f"{it.backbone},{it.width},{row.tag}")


def _words(settings: str) -> set[str]:
    """Return what stands between commas; a dash may be written as a hyphen."""
    return {word.strip() for word in settings.replace("–", "-").split(",") if word.strip()}


def baseline_rows(section: Section, baseline: str) -> list[Row]:
    """Return the rows of a protocol that a baseline fits and that have the metric of its rank."""
    metric = section.protocol.headline
    found = named_rows(section.rows, baseline)
    return [row for row in found if metric in row.results[section.protocol].measures]


def _baseline(section: Section, baseline: str) -> Row | None:
    found = baseline_rows(section, baseline)
    if len(found) > 1:
        rows = "; ".join(map(cells.name, found))
        raise KsclError(
            f"--baseline {baseline}: It fits several rows: {rows}. Add what tells "
            "them apart, as in kscl@2,K=5,40% or random@resnet18."
        )
    return found[0] if found else None


def difference(section: Section, row: Row, to: Row) -> Difference:
    """Return how a row differs from another one, by the metric that ranks them."""
    metric = section.protocol.headline
    one, other = row.results[section.protocol], to.results[section.protocol]
    ours, theirs = one.measures[metric], other.measures[metric]
    return Difference(
        mean=fmean(ours.values) - fmean(theirs.values),
        test=section.test(row, to),
        by_seed=_by_seed(ours, theirs),
        by_image=_by_image(one, other, metric),
        seeds=(len(ours.values), len(theirs.values)),
        shared=len(set(ours.replicates) & set(theirs.replicates)),
    )


def difference_cells(found: Difference) -> list[str]:
    """Return the difference, its three intervals and the seeds as they stand in a table."""
    seeds = f"{found.seeds[0]} and {found.seeds[1]}"
    all_shared = found.seeds == (found.shared, found.shared)
    return [
        f"{found.mean:+.2f}",
        shown_interval(found.welch) or ONE_SEED,
        shown_interval(found.by_seed) or ONE_SEED,
        shown_interval(found.by_image),
        seeds if all_shared else f"{seeds}, {found.shared} shared",
    ]


def _by_seed(one: Measure, other: Measure) -> tuple[float, float] | None:
    ours = dict(zip(one.replicates, one.values, strict=True))
    theirs = dict(zip(other.replicates, other.values, strict=True))
    shared = [seed for seed in ours if seed in theirs]
    return t_interval([ours[seed] - theirs[seed] for seed in shared]) if shared else None


def _by_image(one: Result, other: Result, metric: str) -> tuple[float, float] | None:
    """Pair results under one protocol, whose test images are the same in the same order."""
    per_image = described(one.records)[metric].per_image
    read = _right if per_image else functools.partial(_resampled, metric=metric)
    ours, theirs = (_mean_over_seeds(result, read) for result in (one, other))
    if ours is None or theirs is None or len(ours) != len(theirs):
        return None
    if not per_image:
        low, high = np.percentile(ours - theirs, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
        return float(low), float(high)
    return t_interval(100 * (ours - theirs))


def _mean_over_seeds(
    result: Result, read: Callable[[Record], np.ndarray | None]
) -> np.ndarray | None:
    """Return the mean of an array that every record must have, each pretraining seed once."""
    by_replicate: dict[str, list[np.ndarray]] = {}
    lengths: set[int] = set()
    for trial in result.trials:
        known = [it for file in trial.records if (it := read(file.record)) is not None]
        lengths |= {len(array) for array in known}
        if len(known) < len(trial.records) or len(lengths) > 1:
            return None
        by_replicate.setdefault(trial.replicate, []).append(np.mean(known, axis=0))
    return np.mean([np.mean(trials, axis=0) for trials in by_replicate.values()], axis=0)


def _right(record: Record) -> np.ndarray | None:
    """Return for each test image whether it was classified correctly."""
    given, count = text(record.details.get("right")), image_count(record)
    return hits.from_text(given, count) if given and count else None


def _resampled(record: Record, metric: str) -> np.ndarray | None:
    """Return a metric on each resample of the test images, the same ones for all records."""
    given = record.details.get(f"resampled_{metric}")
    if not isinstance(given, list) or len(given) < 2 or None in map(number, given):
        return None
    return np.array(given, float)


def shown_interval(bounds: Interval | None) -> str:
    """Return both ends of an interval with their signs; empty if there is none."""
    return "" if bounds is None else f"{bounds[0]:+.2f} to {bounds[1]:+.2f}"
