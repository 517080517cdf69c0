"""Records → rows: one per entry, with its result under each protocol.

A result belongs to exactly one protocol (kind, id and hash), and only results of one protocol are
ever compared, so numbers of two protocols never share a column or a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from kscl.benchmark.leaderboard.details import image_count, interval, warnings
from kscl.benchmark.leaderboard.linking import Entry, Link, links
from kscl.benchmark.leaderboard.reading import RecordFile, read_folders
from kscl.benchmark.leaderboard.reported import Reported, reported_rows
from kscl.benchmark.leaderboard.stale import stale_reasons
from kscl.benchmark.leaderboard.statistics import (
    UNTESTED,
    Standing,
    bootstrap_interval,
    standings,
    t_interval,
)
from kscl.benchmark.leaderboard.tags import tags
from kscl.records.provenance import source_hash
from kscl.records.spread import std

# The metrics of each kind that have a column, in this order; others are in the JSON and the panel.
METRICS: dict[str, tuple[str, ...]] = {
    "linear": ("top1", "top5"),
    "knn": ("top1",),
    "svm": ("mAP",),
    "low_shot": ("mAP",),
    "linear_suite": ("mean",),
    "finetune": ("top1", "top5"),
    "detection": (
        *("AP50", "AP", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100"),
        *("mask/AP50", "mask/AP", "mask/AP75"),
    ),
}
HEADLINE = {kind: metrics[0] for kind, metrics in METRICS.items()} | {"detection": "AP"}  # ranks
OPEN_KINDS = ("low_shot", "linear_suite")  # every further metric, one per k or set, is a column too
LEAST_AP50 = 5.0  # some row must reach it, or none is called better than another
COUNTED_OVER_IMAGES = ("top1", "top5")  # the metrics that are a fraction of n test images
FIGURES = ("mean_rank", "minutes_per_epoch", "views_per_second")

OVER_SEEDS = "over pretraining seeds"
OVER_TRIALS = "over trials on one backbone"
TEST_SAMPLING = "test sampling only"


@dataclass(frozen=True)
class ProtocolKey:
    """Under what a result is ranked: results meet only if all three are equal."""

    kind: str
    id: str
    hash: str  # of all that defines it, the data included

    @property
    def order(self) -> tuple[object, ...]:
        """Return a key that sorts protocols: probes first."""
        return list(METRICS).index(self.kind), self.id, self.hash


@dataclass(frozen=True)
class Measure:
    """One metric of one row: a value per pretraining seed, and what follows from them."""

    values: tuple[float, ...]
    replicates: tuple[str, ...]  # whose values they are
    mean: float
    std: float | None = None
    std_is: str = ""
    interval: tuple[float, float] | None = None
    interval_is: str = ""
    standing: Standing = UNTESTED


@dataclass
class TrialRecords:
    """The records of one trial: one backbone evaluated with one seed, perhaps repeatedly."""

    replicate: str
    records: list[RecordFile]

    def mean(self, metric: str) -> float | None:
        """Return the mean of a metric over the records that have it."""
        values = [r.record.metrics[metric] for r in self.records if metric in r.record.metrics]
        return fmean(values) if values else None


@dataclass
class Result:
    """One entry under one protocol."""

    trials: list[TrialRecords]
    measures: dict[str, Measure] = field(default_factory=dict)

    @property
    def n_pretrain(self) -> int:
        """Return the number of pretraining seeds."""
        return len({trial.replicate for trial in self.trials})

    @property
    def n_finetune(self) -> int:
        """Return the number of trials over all pretraining seeds."""
        return len(self.trials)

    @property
    def records(self) -> list[RecordFile]:
        """Return the records of all trials."""
        return [file for trial in self.trials for file in trial.records]

    @property
    def warnings(self) -> list[str]:
        """Return what its records warn of, each once."""
        return list(dict.fromkeys(word for file in self.records for word in warnings(file.record)))


@dataclass
class Row:
    """One entry with its pretrainings and its results."""

    entry: Entry
    pretrainings: list[RecordFile] = field(default_factory=list)
    results: dict[ProtocolKey, Result] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    tag: str = ""  # distinguishes it from rows that look the same
    stale: list[str] = field(default_factory=list)

    @property
    def records(self) -> list[RecordFile]:
        """Return all records of the row."""
        evaluations = (result.records for result in self.results.values())
        return [*self.pretrainings, *(file for records in evaluations for file in records)]


@dataclass
class Section:
    """One protocol: its rows, best first, and what others published under its name."""

    protocol: ProtocolKey
    definition: Any
    rows: list[Row]
    reported: list[Reported]

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the metrics that have a column: those that some row has, and the headline."""
        found = {HEADLINE[self.protocol.kind]}
        found.update(*(row.results[self.protocol].measures for row in self.rows))
        found.update(*(row.metrics for row in self.reported))
        files = [file for row in self.rows for file in row.results[self.protocol].records]
        return tuple(name for name in _columns(self.protocol.kind, files) if name in found)


@dataclass
class Board:
    """Everything that the tables and the page show."""

    rows: list[Row]
    sections: list[Section]
    problems: list[str]
    records: int


def build_board(
    folders: Sequence[str | Path], *, check_stale: bool = True, with_reported: bool = True
) -> Board:
    """Return the board made of the records below these folders."""
    reading = read_folders(folders)
    rows = _rows(reading.records)
    if check_stale:
        reasons = stale_reasons(reading.records, source_hash)
        for row in rows:
            changes = [text for file in row.records for text in reasons.get(file.id, ())]
            row.stale = list(dict.fromkeys(changes))
    sections = [
        _section(protocol, rows, with_reported)
        for protocol in sorted({p for row in rows for p in row.results}, key=lambda p: p.order)
    ]
    # In the order of the first protocol that they were measured under, best first.
    ranks = [{id(row): i for i, row in enumerate(section.rows)} for section in sections]
    rows.sort(key=lambda row: [rank.get(id(row), len(rows)) for rank in ranks])
    return Board(rows, sections, reading.problems, len(reading.records))


def _rows(records: Sequence[RecordFile]) -> list[Row]:
    rows: dict[Entry, Row] = {}
    trials: dict[tuple[Entry, ProtocolKey], dict[tuple[str, str], TrialRecords]] = {}
    for file, found in zip(records, links(records), strict=True):
        row = rows.setdefault(found.entry, Row(found.entry))
        if file.record.kind == "pretrain":
            row.pretrainings.append(file)
            continue
        protocol = _protocol(file)
        of_row = trials.setdefault((found.entry, protocol), {})
        trial = of_row.setdefault(_trial_key(file, found), TrialRecords(found.replicate, []))
        trial.records.append(file)
    for (entry, protocol), found_trials in sorted(trials.items(), key=lambda i: i[0][1].order):
        result = Result([found_trials[key] for key in sorted(found_trials, key=_trial_order)])
        result.measures = dict(_measures(result, protocol))
        rows[entry].results[protocol] = result
    for row in rows.values():
        row.pretrainings.sort(key=lambda file: file.record.seed)
        row.figures = _figures(row.pretrainings)
    ordered = sorted(rows.values(), key=lambda row: row.entry.order)
    for row, tag in zip(ordered, tags([(r.entry, r.pretrainings) for r in ordered]), strict=True):
        row.tag = tag
    return ordered


def _protocol(file: RecordFile) -> ProtocolKey:
    protocol = file.record.protocol
    return ProtocolKey(file.record.kind, protocol.id, protocol.hash)


def _trial_key(file: RecordFile, found: Link) -> tuple[str, str]:
    seed = file.record.seed
    # Detectron2's seed -1 means "any": two such runs are two trials.
    return found.replicate, str(seed) if seed >= 0 else file.id


def _trial_order(key: tuple[str, str]) -> tuple[int, str, int, str]:
    replicate, trial = key
    return len(replicate), replicate, len(trial), trial  # seed 9 before seed 10


def _measures(result: Result, protocol: ProtocolKey) -> Iterable[tuple[str, Measure]]:
    names = {name for file in result.records for name in file.record.metrics}
    columns = METRICS[protocol.kind]
    for metric in [*columns, *sorted(names.difference(columns))]:
        by_replicate: dict[str, list[float]] = {}
        for trial in result.trials:
            value = trial.mean(metric)
            if value is not None:
                by_replicate.setdefault(trial.replicate, []).append(value)
        if not by_replicate:
            continue
        values = tuple(fmean(trials) for trials in by_replicate.values())
        measure = Measure(values, tuple(by_replicate), fmean(values))
        trials_of_one = next(iter(by_replicate.values()))
        if len(values) > 1:
            measure = replace(
                measure,
                std=std(values),
                std_is=OVER_SEEDS,
                interval=_not_negative(t_interval(values), values),
                interval_is=OVER_SEEDS,
            )
        elif len(trials_of_one) > 1:
            measure = replace(measure, std=std(trials_of_one), std_is=OVER_TRIALS)
        else:
            sampled = _sampling_interval(result.records[0], protocol, metric, measure.mean)
            if sampled:
                measure = replace(measure, interval=sampled, interval_is=TEST_SAMPLING)
        yield metric, measure


def _not_negative(
    interval: tuple[float, float] | None, values: Sequence[float]
) -> tuple[float, float] | None:
    """Cut an interval at 0 where no value is below it: AP and accuracies cannot be."""
    if interval is None or min(values) < 0:
        return interval
    return max(0.0, interval[0]), interval[1]


def _sampling_interval(
    file: RecordFile, protocol: ProtocolKey, metric: str, value: float
) -> tuple[float, float] | None:
    """Return the interval over draws of test images: the evaluator's own, or from their number."""
    given = interval(file.record, metric, metric == HEADLINE[protocol.kind])
    n = image_count(file.record)
    if given is None and n is not None and metric in COUNTED_OVER_IMAGES:
        return bootstrap_interval(value, n)
    return given


def _figures(pretrainings: Sequence[RecordFile]) -> dict[str, float]:
    found = {}
    for name in FIGURES:
        metrics = (file.record.metrics for file in pretrainings)
        values = [values[name] for values in metrics if name in values]
        if values:
            found[name] = fmean(values)
    return found


def too_low(kind: str, rows: Sequence[Row], protocol: ProtocolKey) -> bool:
    """Return whether every detector is so poor that which one is better says nothing."""
    found = [row.results[protocol].measures.get("AP50") for row in rows]
    return kind == "detection" and bool(rows) and all(m and m.mean < LEAST_AP50 for m in found)


def _columns(kind: str, files: Iterable[RecordFile]) -> tuple[str, ...]:
    """Return the metrics that may have a column, in the order of the columns."""
    further = [name for file in files for name in file.record.metrics if kind in OPEN_KINDS]
    return tuple(dict.fromkeys([*METRICS[kind], *further]))


def _section(protocol: ProtocolKey, rows: Sequence[Row], with_reported: bool) -> Section:
    mine = [row for row in rows if protocol in row.results]
    unusable = too_low(protocol.kind, mine, protocol)
    files = [file for row in mine for file in row.results[protocol].records]
    for metric in _columns(protocol.kind, files):
        having = [row for row in mine if metric in row.results[protocol].measures]
        groups = [row.results[protocol].measures[metric].values for row in having]
        found = [UNTESTED] * len(groups) if unusable else standings(groups)
        for row, standing in zip(having, found, strict=True):
            measures = row.results[protocol].measures
            measures[metric] = replace(measures[metric], standing=standing)
    headline = HEADLINE[protocol.kind]

    def order(row: Row) -> tuple[float, tuple[object, ...]]:
        measure = row.results[protocol].measures.get(headline)
        return (-measure.mean if measure else float("inf")), row.entry.order

    definition = files[0].record.protocol.definition
    reported = reported_rows(protocol.id) if with_reported else []
    return Section(protocol, definition, sorted(mine, key=order), reported)
