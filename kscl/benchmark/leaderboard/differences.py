"""Rows against each other: by how much they differ and how surely, and in what else."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from kscl.benchmark.leaderboard.columns import cost_cells, cost_labels
from kscl.benchmark.leaderboard.reading import image_count, number, per_class
from kscl.benchmark.leaderboard.reading import text as words_of
from kscl.benchmark.leaderboard.rows import Board, Result, Row, Section, letter
from kscl.benchmark.leaderboard.statistics import LEVEL, PairTest, t_interval
from kscl.benchmark.leaderboard.tables import (
    IDENTITY,
    compact,
    identity,
    interval,
    percent,
    row_name,
    short,
    table,
    text,
    without_empty_columns,
)
from kscl.config import one_line
from kscl.errors import KsclError
from kscl.records import hits
from kscl.records.record import Json, Record

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
NOT_RECORDED = "not recorded"  # what the interval over test images needs
NO_PRETRAINING = "no pretraining record"
INTERVALS = ["Welch", "by seed", "by image", "seeds"]  # the columns beside a difference

PAIRED_ROWS = 40  # of a protocol, the best, whose differences the page can show
ON_PAGE = ("mean", "welch", "by_seed", "by_image", "shared")  # of a difference
DIGITS = 4

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
    parts, fitting = [], 0
    for section in board.sections:
        found = named_rows(section.rows, baseline)
        if len(found) > 1:
            several = "; ".join(map(row_name, found))
            raise KsclError(
                f"--baseline {baseline}: It fits several rows: {several}. Add what tells them "
                "apart, as in kscl@2,K=5,40% or random@resnet18."
            )
        if not found:
            continue
        fitting += 1
        column = text(f"{section.headline_label} − {baseline}'s")
        lines = [
            [*identity(row), *difference_cells(difference(section, row, found[0]))]
            for row in section.rows
            if row is not found[0]
        ]
        if lines:
            shown = compact([*IDENTITY, column, *INTERVALS], lines)
            parts += [f"Under {text(section.name)}:", shown]
    if not fitting:
        rows = named_rows(board.rows, baseline.partition("@")[0])
        names = list(map(row_name, rows)) or sorted({row.entry.method for row in board.rows})
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
    numbers = {short(it.epochs), f"K={short(it.shots)}", percent(it.rho)}
    return numbers | _words(f"{it.backbone},{it.width},{row.tag}")


def _words(settings: str) -> set[str]:
    """Return what stands between commas; a dash may be written as a hyphen."""
    return {word.strip() for word in settings.replace("–", "-").split(",") if word.strip()}


def difference(section: Section, row: Row, to: Row) -> Difference:
    """Return how a row differs from another one, by the metric that ranks them."""
    ours, theirs = section.headline(row), section.headline(to)
    paired = [ours.by_seed[it] - theirs.by_seed[it] for it in ours.by_seed if it in theirs.by_seed]
    return Difference(
        mean=fmean(ours.values) - fmean(theirs.values),
        test=section.test(row, to),
        by_seed=t_interval(paired),
        by_image=_by_image(section, section.result(row), section.result(to)),
        seeds=(len(ours.values), len(theirs.values)),
        shared=len(paired),
    )


def difference_cells(found: Difference) -> list[str]:
    """Return the difference, its three intervals and the seeds as they stand in a table."""
    seeds = f"{found.seeds[0]} and {found.seeds[1]}"
    all_shared = found.seeds == (found.shared, found.shared)
    return [
        f"{found.mean:+.2f}",
        interval(found.welch, "+.2f") or ONE_SEED,
        interval(found.by_seed, "+.2f") or ONE_SEED,
        interval(found.by_image, "+.2f"),
        seeds if all_shared else f"{seeds}, {found.shared} shared",
    ]


def _by_image(section: Section, one: Result, other: Result) -> Interval | None:
    """Pair results under one protocol, whose test images are the same in the same order."""
    metric = section.protocol.headline
    per_image = section.about[metric].per_image

    def read(record: Record) -> np.ndarray | None:
        return _right(record) if per_image else _resampled(record, metric)

    ours, theirs = (_mean_over_seeds(result, read) for result in (one, other))
    if ours is None or theirs is None or len(ours) != len(theirs):
        return None
    if per_image:
        return t_interval(100 * (ours - theirs))
    low, high = np.percentile(ours - theirs, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(low), float(high)


def _mean_over_seeds(
    result: Result, read: Callable[[Record], np.ndarray | None]
) -> np.ndarray | None:
    """Return the mean of an array that every record must have, each pretraining seed once."""
    by_replicate: dict[str, list[np.ndarray]] = {}
    lengths: set[int] = set()
    for (replicate, _), files in result.trials.items():
        known = [it for file in files if (it := read(file.record)) is not None]
        lengths |= {len(array) for array in known}
        if len(known) < len(files) or len(lengths) > 1:
            return None
        by_replicate.setdefault(replicate, []).append(np.mean(known, axis=0))
    return np.mean([np.mean(trials, axis=0) for trials in by_replicate.values()], axis=0)


def _right(record: Record) -> np.ndarray | None:
    """Return for each test image whether it was classified correctly."""
    given, count = words_of(record.details.get("right")), image_count(record)
    return hits.from_text(given, count) if given and count else None


def _resampled(record: Record, metric: str) -> np.ndarray | None:
    """Return a metric on each resample of the test images, the same ones for all records."""
    given = record.details.get(f"resampled_{metric}")
    if not isinstance(given, list) or len(given) < 2 or None in map(number, given):
        return None
    return np.array(given, float)


# Rows side by side


def comparison(board: Board, names: Sequence[str]) -> str:
    """Return the rows of these names in Markdown, each compared with the first.

    Names of rows are long, so letters stand for them and the tables stay narrow.
    """
    rows = {letter(i).upper(): row for i, row in enumerate(_rows(board, names))}
    parts = ["\n".join(f"- {letter}: {_name(row)}" for letter, row in rows.items())]
    together = [
        section
        for section in board.sections
        if sum(section.protocol in row.results for row in rows.values()) > 1
    ]
    for section in together:
        parts += [f"## {text(section.name)}", *_section(section, rows)]
    alone = "No two of these rows were measured under the same protocol."
    parts += [EXPLANATION if together else alone]
    parts += ["## Settings that differ", _differing_settings(rows), "## Costs", _costs(rows)]
    return "\n\n".join(parts) + "\n"


def pairs(section: Section) -> list[Json]:
    """Return the difference of every two of the section's best rows, by their index in it."""

    def rounded(value: object) -> object:
        if isinstance(value, tuple):
            return [rounded(end) for end in value]
        return round(value, DIGITS) if isinstance(value, float) else value

    found = []
    for (i, row), (j, to) in itertools.combinations(enumerate(section.rows[:PAIRED_ROWS]), 2):
        it = difference(section, row, to)
        values = {name: getattr(it, name) for name in ON_PAGE}
        found.append({"one": i, "other": j, **{key: rounded(of) for key, of in values.items()}})
    return found


def class_means(result: Result, metric: str) -> dict[str, float]:
    """Return class name → mean over the records that have a value for it."""
    classes: dict[str, list[float]] = {}
    for file in result.records:
        for name, value in per_class(file.record, metric).items():
            classes.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in classes.items()}


def _rows(board: Board, names: Sequence[str]) -> list[Row]:
    if len(names) < 2:
        raise KsclError("kscl compare needs two or more rows.")
    found: list[Row] = []
    for wanted in names:
        rows = named_rows(board.rows, wanted)
        if len(rows) != 1:
            known = rows or board.rows
            listed = "; ".join(f"{_name(row)} is {row.entry.key}" for row in known[:20])
            reason = "It fits several rows" if rows else "There is no such row"
            raise KsclError(
                f"{wanted}: {reason}. Name a row as in kscl@2,K=5,40%, or by its key: {listed}."
            )
        if rows[0] in found:
            raise KsclError(f"{wanted}: The row is named twice.")
        found += rows
    return found


def _name(row: Row) -> str:
    return text(row_name(row))


def _section(section: Section, rows: Mapping[str, Row]) -> list[str]:
    having = {of: row for of, row in rows.items() if section.protocol in row.results}
    means = {of: f"{section.headline(row).mean:.2f}" for of, row in having.items()}
    first, *others = having
    metric = section.protocol.headline
    label = section.label(metric)
    lines = [[first, means[first], *[""] * 5]]
    for other in others:
        found = difference_cells(difference(section, having[other], having[first]))
        lines.append([other, means[other], *(word or NOT_RECORDED for word in found)])
    header = ["row", label, f"− {first}", *INTERVALS]
    results = {of: section.result(row) for of, row in having.items()}
    return [table(*without_empty_columns(header, lines)), *_classes(results, metric, label)]


def _classes(results: dict[str, Result], metric: str, label: str) -> list[str]:
    """Return a table of classes, where the rows differ most first."""
    values = {name: class_means(result, metric) for name, result in results.items()}
    known = {name: found for name, found in values.items() if found}
    if len(known) < 2:
        return []
    first, *others = known
    names = [name for name in known[first] if any(name in known[other] for other in others)]

    def spread(name: str) -> float:
        found = [known[row][name] for row in known if name in known[row]]
        return max(found) - min(found)

    lines = [
        [text(name), *(f"{known[row][name]:.2f}" if name in known[row] else "" for row in known)]
        for name in sorted(names, key=spread, reverse=True)
    ]
    return [
        f"{label} of each class, those that differ most first:",
        table(["class", *known], lines),
    ]


def _differing_settings(rows: Mapping[str, Row]) -> str:
    values = {of: row.settings for of, row in rows.items()}
    configs = [config for config in values.values() if config is not None]
    keys = sorted({key for config in configs for key in config})
    lines = []
    for key in keys:
        shown = [
            NO_PRETRAINING if config is None else one_line(config[key]) if key in config else "–"
            for config in values.values()
        ]
        if len({word for word in shown if word != NO_PRETRAINING}) > 1:
            said = (f"{of} {text(word)}" for of, word in zip(values, shown, strict=True))
            lines.append(f"- {text(key)}: {'; '.join(said)}")
    without = [name for name, config in values.items() if config is None]
    parts = [f"{name}: {NO_PRETRAINING}, so its settings are not known." for name in without]
    if lines:
        parts.insert(0, "\n".join(lines))
    elif len(configs) > 1:
        parts.insert(0, "None that can change a result.")
    return "\n\n".join(parts)


def _costs(rows: Mapping[str, Row]) -> str:
    labels = cost_labels([*rows.values()])
    cells = zip(*(cost_cells(row, [*labels]) for row in rows.values()), strict=True)
    lines = [[label, *found] for label, found in zip(labels.values(), cells, strict=True)]
    return table(["cost", *rows], [line for line in lines if any(line[1:])])
