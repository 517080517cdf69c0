"""What a board is made of: rows, their results under each protocol, and the metrics with a column.

A result belongs to exactly one protocol (kind, id and hash), and only results of one protocol are
ever compared, so numbers of two protocols never share a column or a test.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

from kscl.benchmark.leaderboard.details import inside, is_random, number, warnings
from kscl.benchmark.leaderboard.linking import Entry
from kscl.benchmark.leaderboard.reading import RecordFile
from kscl.benchmark.leaderboard.reported import Reported
from kscl.benchmark.leaderboard.statistics import UNTESTED, Pairs, PairTest, Standing, compare_all
from kscl.records.record import Metric, TaskInfo

FIGURES = ("mean_rank", "minutes_per_epoch", "views_per_second")

FROM_SCRATCH = "from scratch"  # the method of detectors that had no backbone's weights

OVER_SEEDS = "over pretraining seeds"
OVER_TRIALS = "over trials on one backbone"
TEST_SAMPLING = "test sampling only"


@dataclass(frozen=True)
class ProtocolKey:
    """Under what a result is ranked: results meet only if all three are equal."""

    kind: str
    id: str
    hash: str  # of all that defines it, the data included
    title: str  # of the task
    headline: str  # the metric that ranks
    lower_is_better: bool

    @property
    def order(self) -> tuple[object, ...]:
        """Return a key that sorts protocols: classifiers before detectors."""
        return self.title, self.kind, self.id, self.hash, self.headline, self.lower_is_better


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

    @property
    def parameters(self) -> float | None:
        """Return the number of parameters of the backbone, if a record tells it."""
        told = (
            number(file.record.details.get("parameters"))
            or number(inside(file.record.details, "backbone", "parameters"))
            for file in self.records
        )
        return next((count for count in told if count), None)

    @property
    def is_pretrained(self) -> bool:
        """Return whether its weights are neither random nor trained with the detector alone."""
        scratch = self.entry.method == FROM_SCRATCH
        return bool(self.pretrainings) or not (
            scratch or any(is_random(file.record) for file in self.records)
        )

    @property
    def doubts(self) -> list[str]:
        """Return what its pretrainings warn of, each once: the row is then never called best."""
        found = (word for file in self.pretrainings for word in warnings(file.record))
        return list(dict.fromkeys(found))


@dataclass
class Section:
    """One protocol: its rows, best first, and what others published under its name."""

    protocol: ProtocolKey
    definition: Any
    rows: list[Row]
    reported: list[Reported]

    def compared(self, metric: str) -> tuple[list[Row], Pairs]:
        """Return the rows that have a metric, and the tests of every two of them."""
        having = [row for row in self.rows if metric in row.results[self.protocol].measures]
        values = [row.results[self.protocol].measures[metric].values for row in having]
        return having, compare_all(values)

    @cached_property
    def _headline_pairs(self) -> tuple[dict[int, int], Pairs]:
        having, pairs = self.compared(self.protocol.headline)
        return {id(row): i for i, row in enumerate(having)}, pairs

    def test(self, row: Row, to: Row) -> PairTest | None:
        """Return the test of two rows by the headline; None if one of them has a single seed."""
        indices, pairs = self._headline_pairs
        return pairs.test(indices[id(row)], indices[id(to)])

    @cached_property  # asked for by every row of every table
    def metrics(self) -> tuple[str, ...]:
        """Return the metrics that have a column: those that some row has, and the headline."""
        found = {self.protocol.headline}
        found.update(*(row.results[self.protocol].measures for row in self.rows))
        found.update(*(row.metrics for row in self.reported))
        return tuple(name for name in self.about if name in found)

    @cached_property
    def about(self) -> dict[str, Metric]:
        """Return the metrics that may have a column, in the order of the columns."""
        return described(file for row in self.rows for file in row.results[self.protocol].records)

    @property
    def task(self) -> TaskInfo:
        """Return what the records say about the task."""
        return self.rows[0].results[self.protocol].records[0].record.task

    def label(self, metric: str) -> str:
        """Return the column name of a metric; one that records do not describe has its name."""
        return self.about[metric].label if metric in self.about else metric.replace("/", " ")

    @cached_property
    def further_metrics(self) -> tuple[str, ...]:
        """Return metrics that have no column, such as those of a detector's other scorers.

        Only CSV and page have room for them.
        """
        found = {name for row in self.rows for name in row.results[self.protocol].measures}
        order = list(self.about)

        def place(name: str) -> tuple[str, int, str]:
            scorer, _, metric = name.rpartition("/")
            return scorer, order.index(metric) if metric in order else len(order), name

        return tuple(sorted(found.difference(self.metrics), key=place))


@dataclass(frozen=True)
class MeanRank:
    """One row's mean rank, over how many protocols, and its interval."""

    row: Row
    mean: float
    protocols: int
    interval: tuple[float, float] | None


@dataclass
class Board:
    """Everything that the tables and the page show."""

    rows: list[Row]
    sections: list[Section]
    mean_ranks: list[MeanRank]
    problems: list[str]
    records: int
    folders: list[str]  # that were read, as they were named


def described(files: Iterable[RecordFile]) -> dict[str, Metric]:
    """Return the metrics that records describe, in the order of the columns."""
    found: dict[str, Metric] = {}
    for file in files:
        for metric in file.record.task.metrics:
            found.setdefault(metric.name, metric)
    return found
