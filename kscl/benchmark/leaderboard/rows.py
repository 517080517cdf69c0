"""Records → the board: one row per entry, with its result under each protocol, best first.

A result belongs to exactly one protocol (kind, id, hash and what ranks it), and only results of one
protocol are ever compared, so numbers of two protocols never share a column or a test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from kscl.benchmark.leaderboard.entries import Entry, Link, links, made_backbone, tags
from kscl.benchmark.leaderboard.reading import (
    RecordFile,
    image_count,
    inside,
    interval,
    is_random,
    number,
    read_folders,
    text,
    warnings,
)
from kscl.benchmark.leaderboard.reported import Reported, reported_rows
from kscl.benchmark.leaderboard.statistics import (
    LEVEL,
    UNTESTED,
    Pairs,
    PairTest,
    Standing,
    bootstrap_interval,
    compare_all,
    standings,
    t_interval,
)
from kscl.errors import KsclError
from kscl.records.fingerprint import fingerprint
from kscl.records.provenance import source_hash
from kscl.records.record import Metric, TaskInfo
from kscl.records.spread import std
from kscl.runtime.files import sha256_of

FROM_SCRATCH = "from scratch"  # the method of detectors that had no backbone's weights
BACKBONE_FILE = "backbone.safetensors"

OVER_SEEDS = "over pretraining seeds"
OVER_TRIALS = "over trials on one backbone"
TEST_SAMPLING = "test sampling only"

DRAWS = 2000  # of seeds, for the interval of a mean rank
SEED = 0  # equal records give equal intervals
MAX_RANKED_ROWS = 300  # more rows have no summary: nobody reads it, and it takes long
WHAT_MEAN_RANKS_ARE = (
    "A summary, not a ranking: the mean over protocols of a row's rank by its mean (1 is best), "
    "among the rows that were measured under each. A protocol under which a row was not measured "
    "is left out for it, so rows with other protocols are not comparable. The 95% interval is a "
    "percentile bootstrap over pretraining seeds; without several seeds there is none."
)


@dataclass(frozen=True)
class ProtocolKey:
    """Under what a result is ranked: results meet only if all of it is equal."""

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

    @property
    def too_low(self) -> tuple[Metric, float] | None:
        """Return the lowest number below which a run says nothing of its row, if there is one."""
        found = [
            (metric, value)
            for record in (file.record for file in self.records)
            for metric in record.task.metrics
            if (value := record.metrics.get(metric.name)) is not None
            and metric.unranked_below is not None
            and value < metric.unranked_below
        ]
        return min(found, key=lambda pair: pair[1]) if found else None


@dataclass
class Row:
    """One entry with its pretrainings and its results."""

    entry: Entry
    pretrainings: list[RecordFile] = field(default_factory=list)
    results: dict[ProtocolKey, Result] = field(default_factory=dict)
    tag: str = ""  # distinguishes it from rows that look the same
    stale: list[str] = field(default_factory=list)

    @property
    def records(self) -> list[RecordFile]:
        """Return all records of the row."""
        evaluations = (result.records for result in self.results.values())
        return [*self.pretrainings, *(file for records in evaluations for file in records)]

    @property
    def parameters(self) -> float | None:
        """Return the number of parameters of the backbone, if a record has it."""
        counts = (
            number(file.record.details.get("parameters"))
            or number(inside(file.record.details, "backbone", "parameters"))
            for file in self.records
        )
        return next((count for count in counts if count), None)

    @property
    def is_pretrained(self) -> bool:
        """Return whether its weights are neither random nor trained with the detector alone."""
        scratch = self.entry.method == FROM_SCRATCH
        return bool(self.pretrainings) or not (
            scratch or any(is_random(file.record) for file in self.records)
        )

    @property
    def warnings(self) -> list[str]:
        """Return what its pretrainings warn of, each once: the row is then never called best."""
        found = (word for file in self.pretrainings for word in warnings(file.record))
        return list(dict.fromkeys(found))

    def figure(self, name: str) -> float | None:
        """Return the mean of a metric of its pretrainings, over those that have it."""
        metrics = (file.record.metrics for file in self.pretrainings)
        values = [values[name] for values in metrics if name in values]
        return fmean(values) if values else None

    def is_ranked(self, protocol: ProtocolKey) -> bool:
        """Return whether nothing speaks against comparing its result with others."""
        return not self.warnings and self.results[protocol].too_low is None


@dataclass
class Section:
    """One protocol: its rows, best first, and what others published under its name."""

    protocol: ProtocolKey
    definition: Any
    rows: list[Row]
    reported: list[Reported]

    @property
    def results(self) -> list[Result]:
        """Return the results of its rows."""
        return [row.results[self.protocol] for row in self.rows]

    def headline(self, row: Row) -> Measure:
        """Return the measure that ranks a row."""
        return row.results[self.protocol].measures[self.protocol.headline]

    def compared(self, metric: str) -> tuple[list[Row], Pairs]:
        """Return the rows that have a metric, and the tests of every two of them."""
        having = [row for row in self.rows if metric in row.results[self.protocol].measures]
        return having, compare_all(
            [row.results[self.protocol].measures[metric].values for row in having]
        )

    @cached_property
    def _headline_pairs(self) -> tuple[dict[int, int], Pairs]:
        having, pairs = self.compared(self.protocol.headline)
        return {id(row): i for i, row in enumerate(having)}, pairs

    def test(self, row: Row, to: Row) -> PairTest | None:
        """Return the test of two rows by the headline; None if one of them has a single seed."""
        indices, pairs = self._headline_pairs
        return pairs.test(indices[id(row)], indices[id(to)])

    @cached_property
    def about(self) -> dict[str, Metric]:
        """Return the metrics that may have a column, in the order of the columns."""
        return described(file for result in self.results for file in result.records)

    @property
    def task(self) -> TaskInfo:
        """Return what the records say about the task."""
        return self.results[0].records[0].record.task

    def label(self, metric: str) -> str:
        """Return the column name of a metric; one that records do not describe has its name."""
        return self.about[metric].label if metric in self.about else metric.replace("/", " ")

    @cached_property  # asked for by every row of every table
    def metrics(self) -> tuple[str, ...]:
        """Return the metrics that have a column, the headline first: those that some row has."""
        found = {name for result in self.results for name in result.measures}
        found |= {name for row in self.reported for name in row.metrics}
        named = [name for name in self.about if name in found]
        return tuple(sorted(named, key=lambda name: name != self.protocol.headline))

    @cached_property
    def further_metrics(self) -> tuple[str, ...]:
        """Return metrics that have no column, such as those of a detector's other scorers.

        Only CSV and page have room for them.
        """
        found = {name for result in self.results for name in result.measures}
        order = list(self.about)

        def place(name: str) -> tuple[str, int, str]:
            scorer, _, metric = name.rpartition("/")
            return scorer, order.index(metric) if metric in order else len(order), name

        return tuple(sorted(found.difference(self.metrics), key=place))


@dataclass(frozen=True)
class MeanRank:
    """One row's mean rank, over how many protocols, and its interval."""

    row: Row
    mean_rank: float
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


def build_board(
    folders: Sequence[str | Path], *, check_stale: bool = True, with_reported: bool = True
) -> Board:
    """Return the board made of the records below these folders."""
    reading = read_folders(folders)
    rows = _rows(reading.records)
    if check_stale:
        reasons = stale_reasons(reading.records)
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
    names = [str(folder) for folder in folders]
    ranked = mean_ranks(rows, sections)
    return Board(rows, sections, ranked, reading.problems, len(reading.records), names)


def described(files: Iterable[RecordFile]) -> dict[str, Metric]:
    """Return the metrics that records describe, in the order of the columns."""
    found: dict[str, Metric] = {}
    for file in files:
        for metric in file.record.task.metrics:
            found.setdefault(metric.name, metric)
    return found


def _rows(records: Sequence[RecordFile]) -> list[Row]:
    rows: dict[Entry, Row] = {}
    trials: dict[tuple[Entry, ProtocolKey], dict[tuple[str, str], TrialRecords]] = {}
    for file, found in zip(records, links(records), strict=True):
        row = rows.setdefault(found.entry, Row(found.entry))
        if file.record.kind == "pretrain":
            row.pretrainings.append(file)
            continue
        of_row = trials.setdefault((found.entry, _protocol(file)), {})
        trial = of_row.setdefault(_trial_key(file, found), TrialRecords(found.replicate, []))
        trial.records.append(file)
    for (entry, protocol), found_trials in sorted(trials.items(), key=lambda i: i[0][1].order):
        result = Result([found_trials[key] for key in sorted(found_trials, key=_trial_order)])
        result.measures = dict(_measures(result, protocol))
        rows[entry].results[protocol] = result
    for row in rows.values():
        row.pretrainings.sort(key=lambda file: file.record.seed)
    ordered = sorted(rows.values(), key=lambda row: row.entry.order)
    for row, tag in zip(ordered, tags([(r.entry, r.pretrainings) for r in ordered]), strict=True):
        row.tag = tag
    return ordered


def _protocol(file: RecordFile) -> ProtocolKey:
    record, protocol = file.record, file.record.protocol
    headline = next(metric for metric in record.task.metrics if metric.headline)
    ranked = (record.task.title, headline.name, headline.lower_is_better)
    return ProtocolKey(record.kind, protocol.id, protocol.hash, *ranked)


def _trial_key(file: RecordFile, found: Link) -> tuple[str, str]:
    seed, draw = file.record.seed, file.record.details.get("draw", "")
    # Detectron2's seed -1 means "any": two such runs are two trials.
    return found.replicate, f"{seed} {draw}".strip() if seed >= 0 else file.id


def _trial_order(key: tuple[str, str]) -> tuple[int, str, int, str]:
    replicate, trial = key
    return len(replicate), replicate, len(trial), trial  # seed 9 before seed 10


def _measures(result: Result, protocol: ProtocolKey) -> Iterator[tuple[str, Measure]]:
    """Yield every metric of a result: means over seeds, their spread and interval."""
    names = {name for file in result.records for name in file.record.metrics}
    about = described(result.records)
    for metric in [*about, *sorted(names.difference(about))]:
        by_replicate: dict[str, list[float]] = {}
        for trial in result.trials:
            if (value := trial.mean(metric)) is not None:
                by_replicate.setdefault(trial.replicate, []).append(value)
        if not by_replicate:
            continue
        values = tuple(fmean(trials) for trials in by_replicate.values())
        measure = Measure(values, tuple(by_replicate), fmean(values))
        trials_of_one = next(iter(by_replicate.values()))
        if len(values) > 1:
            ends = _in_percent(t_interval(values), values)
            measure = replace(measure, std=std(values), std_is=OVER_SEEDS)
            measure = replace(measure, interval=ends, interval_is=OVER_SEEDS)
        elif len(trials_of_one) > 1:
            measure = replace(measure, std=std(trials_of_one), std_is=OVER_TRIALS)
        else:
            per_image = metric in about and about[metric].per_image
            is_headline = metric == protocol.headline
            ends = _sampling_interval(result.records, metric, values[0], is_headline, per_image)
            if ends:
                measure = replace(measure, interval=ends, interval_is=TEST_SAMPLING)
        yield metric, measure


def _in_percent(
    ends: tuple[float, float] | None, values: Sequence[float]
) -> tuple[float, float] | None:
    """Cut an interval at 0 and 100 where no value is outside: AP and accuracies cannot be."""
    if ends is None or min(values) < 0 or max(values) > 100:
        return ends
    return max(0.0, ends[0]), min(100.0, ends[1])


def _sampling_interval(
    files: Sequence[RecordFile], metric: str, value: float, is_headline: bool, per_image: bool
) -> tuple[float, float] | None:
    """Return the interval over draws of test images: the evaluator's own, or from their number.

    The mean of a trial that was recorded several times has none of its own.
    """
    first = files[0].record
    given = interval(first, metric, is_headline) if len(files) == 1 else None
    n = image_count(first)
    return bootstrap_interval(value, n) if given is None and n and per_image else given


def _section(protocol: ProtocolKey, rows: Sequence[Row], with_reported: bool) -> Section:
    mine = [row for row in rows if protocol in row.results]
    sign = 1 if protocol.lower_is_better else -1

    def order(row: Row) -> tuple[float, tuple[object, ...]]:
        return sign * row.results[protocol].measures[protocol.headline].mean, row.entry.order

    definition = mine[0].results[protocol].records[0].record.protocol.definition
    reported = reported_rows(protocol.id) if with_reported else []
    section = Section(protocol, definition, sorted(mine, key=order), reported)
    for metric, about in section.about.items():
        having, pairs = section.compared(metric)
        ranked = [i for i, row in enumerate(having) if row.is_ranked(protocol)]
        found = standings(pairs, ranked, about.lower_is_better)
        for row, standing in zip(having, found, strict=True):
            measures = row.results[protocol].measures
            measures[metric] = replace(measures[metric], standing=standing)
    return section


# Mean ranks say less than any of their parts: ranks forget by how much rows differ, protocols count
# alike, and rows that miss a protocol are ranked among others. So they are shown apart.


def mean_ranks(rows: Sequence[Row], sections: Sequence[Section]) -> list[MeanRank]:
    """Return the rows with a rank: those with the most protocols first, then by their mean.

    The interval is by resampling seeds. Empty unless two protocols rank two rows each.
    """
    all_ranked = [[row for row in s.rows if row.is_ranked(s.protocol)] for s in sections]
    usable = [(s, of) for s, of in zip(sections, all_ranked, strict=True) if len(of) > 1]
    if len(usable) < 2 or len(rows) > MAX_RANKED_ROWS:
        return []
    chance = np.random.default_rng(SEED)
    picks: dict[tuple[int, tuple[str, ...]], np.ndarray] = {}  # of the seeds of a row
    plain: dict[int, list[float]] = {}
    drawn: dict[int, list[np.ndarray]] = {}
    for section, ranked in usable:
        measures = [section.headline(row) for row in ranked]
        means = []
        for row, measure in zip(ranked, measures, strict=True):
            # The same seeds are drawn under every protocol that has them: they are the units.
            key, count = (id(row), measure.replicates), len(measure.values)
            if key not in picks:
                picks[key] = chance.integers(count, size=(DRAWS, count))
            means.append(np.asarray(measure.values)[picks[key]].mean(axis=1))
        sign = 1 if section.protocol.lower_is_better else -1
        ranks = _ranks(sign * np.array([[measure.mean for measure in measures]]))[0]
        redrawn = _ranks(sign * np.stack(means, axis=1))
        for i, row in enumerate(ranked):
            plain.setdefault(id(row), []).append(float(ranks[i]))
            drawn.setdefault(id(row), []).append(redrawn[:, i])
    found = []
    for row in rows:
        if id(row) in plain:
            of_row = plain[id(row)]
            several = any(result.n_pretrain > 1 for result in row.results.values())
            bounds = [50 * (1 - LEVEL), 50 * (1 + LEVEL)]
            low, high = np.percentile(np.mean(drawn[id(row)], axis=0), bounds)
            ends = (float(low), float(high)) if several else None
            found.append(MeanRank(row, float(np.mean(of_row)), len(of_row), ends))
    return sorted(found, key=lambda it: (-it.protocols, it.mean_rank))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks (draws, rows), lowest first; equal values share the mean of their ranks."""
    from scipy.stats import rankdata  # takes half a second to import, and few boards need it

    ranks: np.ndarray = rankdata(values, axis=1)
    return ranks


# A row is stale if code, data or backbone file differ from what was recorded. Only hashes count; a
# file or folder that does not exist here says nothing: the record may come from another machine.


def stale_reasons(records: Sequence[RecordFile]) -> dict[str, list[str]]:
    """Return record id → what changed since; a record that still holds is not in it."""
    # Many records share their code and data: each is hashed once, and only for this call.
    data_hash, code_hash = functools.cache(_fingerprint), functools.cache(source_hash)
    found = {}
    for file in records:
        code = file.record.code
        now = code_hash(tuple(code.modules))
        reasons = changed_data(file, data_hash)
        if now and now != code.source_hash:
            reasons.insert(0, f"The code was {code.source_hash} and is {now}.")
        made = made_backbone(file.record)
        name = text(inside(file.record.details, "files", "backbone")) or BACKBONE_FILE
        is_now = _sha256(file.path.parent / name) if made else None
        if made and is_now and is_now != made:
            reasons.append(f"The backbone file was {made[:16]} and is {is_now[:16]}.")
        if reasons:
            found[file.id] = reasons
    return found


def _fingerprint(path: Path) -> str | None:
    try:
        return fingerprint(path).hash
    except (KsclError, OSError):
        return None


def changed_data(
    file: RecordFile, hash_of: Callable[[Path], str | None] = _fingerprint
) -> list[str]:
    """Return one sentence for each set of a record that is here and differs from what it was."""
    reasons = []
    trained_on = text(inside(file.record.config.values, "DATA", "TRAIN"))
    for role, recorded in sorted(file.record.data.items()):
        parts = inside(recorded, "parts")  # of data in several folders
        for part in parts if isinstance(parts, list) else [recorded]:
            path, then = text(inside(part, "path")), text(inside(part, "hash"))
            if path is None and file.record.kind == "pretrain":
                path = trained_on
            now = hash_of(Path(path)) if path and then else None
            if now is not None and now != then:
                reasons.append(f"The {role} data was {then} and is {now}.")
    return reasons


def _sha256(path: Path) -> str | None:
    try:
        return sha256_of(path) if path.is_file() else None
    except OSError:
        return None
