"""Records → the board: one row per entry, with its result under each protocol, best first.

A result belongs to exactly one protocol (kind, id, hash and what ranks it), and only results of one
protocol are ever compared, so numbers of two protocols never share a column or a test.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from kscl.benchmark.leaderboard.entries import (
    SAME_FOR_ALL_SEEDS,
    Entry,
    links,
    made_backbone,
    processes,
)
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
from kscl.config import leaves_without
from kscl.errors import KsclError
from kscl.records.fingerprint import fingerprint
from kscl.records.provenance import source_hash
from kscl.records.record import Json, Metric, Record, TaskInfo
from kscl.records.spread import std
from kscl.runtime.files import sha256_of

FROM_SCRATCH = "from scratch"  # the method of detectors that had no backbone's weights
BACKBONE_FILE = "backbone.safetensors"
MAX_DIFFERENCES = 3  # settings that tell two protocols of one id apart
MAX_NAME = 80  # characters; one longer name would widen its column in every row
MAX_SETTINGS = 2  # that set a row apart from one that looks the same
IN_COLUMNS = (
    *("LABEL", "METHOD.NUM_SHOTS", "METHOD.RHO"),
    *("BACKBONE.NAME", "BACKBONE.KWARGS.channels", "SOLVER.EPOCHS"),
)

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


@dataclass(frozen=True, order=True)
class ProtocolKey:
    """Under what a result is ranked: results meet only if all of it is equal."""

    title: str  # of the task; first, so that classifiers sort before detectors
    kind: str
    id: str
    hash: str  # of all that defines it, the data included
    headline: str  # the metric that ranks
    lower_is_better: bool


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

    @property
    def by_seed(self) -> dict[str, float]:
        """Return the value of every replicate."""
        return dict(zip(self.replicates, self.values, strict=True))


@dataclass
class Result:
    """One entry under one protocol."""

    # (replicate, seed) → the records of one backbone evaluated with one seed, perhaps repeatedly
    trials: dict[tuple[str, str], list[RecordFile]] = field(default_factory=dict)
    measures: dict[str, Measure] = field(default_factory=dict)

    @property
    def n_pretrain(self) -> int:
        """Return the number of pretraining seeds."""
        return len({replicate for replicate, _ in self.trials})

    @property
    def n_finetune(self) -> int:
        """Return the number of trials over all pretraining seeds."""
        return len(self.trials)

    @property
    def records(self) -> list[RecordFile]:
        """Return the records of all trials."""
        return [file for files in self.trials.values() for file in files]

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


@dataclass(eq=False)  # a key of dicts
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
    def settings(self) -> dict[str, Any] | None:
        """Return the settings of its pretrainings but for the seed; None without pretraining."""
        if not self.pretrainings:
            return None
        return leaves_without(self.pretrainings[0].record.config.values, SAME_FOR_ALL_SEEDS)

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
        is_random_or_scratch = self.entry.method == FROM_SCRATCH or any(
            is_random(file.record) for file in self.records
        )
        return bool(self.pretrainings) or not is_random_or_scratch

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


@dataclass(eq=False)  # a key of dicts
class Section:
    """One protocol: its rows, best first, and what others published under its name."""

    protocol: ProtocolKey
    definition: Json
    rows: list[Row]
    reported: list[Reported]
    name: str = ""  # id, hash, and what tells it from other protocols of its id
    letter: str = ""  # tells the columns of several protocols of one kind apart

    @property
    def results(self) -> list[Result]:
        """Return the results of its rows."""
        return [self.result(row) for row in self.rows]

    def result(self, row: Row) -> Result:
        """Return the result of one of its rows."""
        return row.results[self.protocol]

    def headline(self, row: Row) -> Measure:
        """Return the measure that ranks a row."""
        return self.result(row).measures[self.protocol.headline]

    @property
    def headline_label(self) -> str:
        """Return the column name of the metric that ranks."""
        return self.label(self.protocol.headline)

    @cached_property
    def comparisons(self) -> dict[str, tuple[dict[Row, int], Pairs]]:
        """Return for every described metric the tests of every two rows, and the rows' places."""
        found = {}
        for metric in self.about:
            measures = {row: self.result(row).measures.get(metric) for row in self.rows}
            values = {row: measure.values for row, measure in measures.items() if measure}
            places = {row: i for i, row in enumerate(values)}
            found[metric] = places, compare_all([*values.values()])
        return found

    def test(self, row: Row, to: Row) -> PairTest | None:
        """Return the test of two rows by the headline; None if one of them has a single seed."""
        places, pairs = self.comparisons[self.protocol.headline]
        return pairs.test(places[row], places[to])

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
        for protocol in sorted({protocol for row in rows for protocol in row.results})
    ]
    _set_names(sections)
    # In the order of the first protocol that they were measured under, best first.
    ranks = [{row: i for i, row in enumerate(section.rows)} for section in sections]
    rows.sort(key=lambda row: [rank.get(row, len(rows)) for rank in ranks])
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
    found: dict[Entry, Row] = {}
    for file, (entry, replicate) in zip(records, links(records), strict=True):
        row = found.setdefault(entry, Row(entry))
        if file.record.kind == "pretrain":
            row.pretrainings.append(file)
            continue
        seed, draw = file.record.seed, file.record.details.get("draw", "")
        # Detectron2's seed -1 means "any": two such runs are two trials.
        trial = f"{seed} {draw}".strip() if seed >= 0 else file.id
        result = row.results.setdefault(_protocol(file.record), Result())
        result.trials.setdefault((replicate, trial), []).append(file)
    rows = sorted(found.values(), key=lambda row: row.entry.order)
    for row in rows:
        row.pretrainings.sort(key=lambda file: file.record.seed)
        row.results = dict(sorted(row.results.items()))
        for result in row.results.values():
            result.trials = dict(sorted(result.trials.items(), key=_trial_order))
            result.measures = dict(_measures(result))
    _set_tags(rows)
    return rows


def _protocol(record: Record) -> ProtocolKey:
    headline, it = record.task.headline, record.protocol
    ranks = headline.name, headline.lower_is_better
    return ProtocolKey(record.task.title, record.kind, it.id, it.hash, *ranks)


def _trial_order(trial: tuple[tuple[str, str], object]) -> list[tuple[int, str]]:
    return [(len(part), part) for part in trial[0]]  # seed 9 before seed 10


def _set_tags(rows: Sequence[Row]) -> None:
    """Give every row the settings in which it differs from rows like it, or a short hash.

    A longer training than the protocol's is always among them.
    """
    alike: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        longer = row.entry.longer
        row.tag = f"trained {longer:.3g}× as long" if longer > 1 else ""
        alike.setdefault((*row.entry.shown, longer), []).append(row)
    for same in alike.values():
        if len(same) > 1:
            for row, words in zip(same, _distinguishing(same), strict=True):
                row.tag = ", ".join(filter(None, (words, row.tag)))


def _distinguishing(rows: Sequence[Row]) -> list[str]:
    settings = [dict(row.settings or {}) for row in rows]
    for row, values in zip(rows, settings, strict=True):
        if row.pretrainings:
            values["PROCESSES"] = processes(row.pretrainings[0].record)
    keys = sorted({key for values in settings for key in values}.difference(IN_COLUMNS))
    differing = [key for key in keys if len({repr(values.get(key)) for values in settings}) > 1]
    short = {key: key.rpartition(".")[2].lower().replace("_", " ") for key in differing}
    hashes = [f"settings {row.entry.config[:6]}" for row in rows]
    words = [
        ", ".join(f"{short[key]} {values[key]}" for key in differing if key in values)
        for values in settings
    ]
    if len(differing) > MAX_SETTINGS or max(map(len, words)) > 60:
        words = hashes
    if len(set(words)) < len(rows):
        data = [f"data {row.entry.data[:6]}" if row.entry.data else "" for row in rows]
        words = [", ".join(filter(None, both)) for both in zip(words, data, strict=True)]
    # Nothing may be known of several files.
    return words if len(set(words)) == len(rows) else hashes


def _measures(result: Result) -> Iterator[tuple[str, Measure]]:
    """Yield every metric of a result: means over seeds, their spread and interval."""
    names = {name for file in result.records for name in file.record.metrics}
    about = described(result.records)
    for metric in [*about, *sorted(names.difference(about))]:
        by_replicate: dict[str, list[float]] = {}
        for (replicate, _), files in result.trials.items():
            metrics = (file.record.metrics for file in files)
            if known := [values[metric] for values in metrics if metric in values]:
                by_replicate.setdefault(replicate, []).append(fmean(known))
        if not by_replicate:
            continue
        values = tuple(map(fmean, by_replicate.values()))
        trials = next(iter(by_replicate.values()))
        more: Json = {}
        if len(values) > 1:
            ends = _in_percent(t_interval(values), values)
            more = {"std": std(values), "std_is": OVER_SEEDS}
            more |= {"interval": ends, "interval_is": OVER_SEEDS}
        elif len(trials) > 1:
            more = {"std": std(trials), "std_is": OVER_TRIALS}
        elif ends := _sampling_interval(result, metric, values[0]):
            more = {"interval": ends, "interval_is": TEST_SAMPLING}
        yield metric, Measure(values, tuple(by_replicate), fmean(values), **more)


def _in_percent(
    ends: tuple[float, float] | None, values: Sequence[float]
) -> tuple[float, float] | None:
    """Cut an interval at 0 and 100 where no value is outside: AP and accuracies cannot be."""
    if ends is None or min(values) < 0 or max(values) > 100:
        return ends
    return max(0.0, ends[0]), min(100.0, ends[1])


def _sampling_interval(result: Result, metric: str, value: float) -> tuple[float, float] | None:
    """Return the interval over draws of test images: the evaluator's own, or from their number.

    The mean of a trial that was recorded several times has none of its own.
    """
    first, *more = (file.record for file in result.records)
    given = None if more else interval(first, metric)
    n, about = image_count(first), described(result.records).get(metric)
    return bootstrap_interval(value, n) if not given and n and about and about.per_image else given


def _section(protocol: ProtocolKey, rows: Sequence[Row], with_reported: bool) -> Section:
    mine = [row for row in rows if protocol in row.results]
    sign = 1 if protocol.lower_is_better else -1

    def order(row: Row) -> tuple[float, tuple[object, ...]]:
        return sign * row.results[protocol].measures[protocol.headline].mean, row.entry.order

    definition = mine[0].results[protocol].records[0].record.protocol.definition
    reported = reported_rows(protocol.id) if with_reported else []
    section = Section(protocol, definition, sorted(mine, key=order), reported)
    for metric, (places, pairs) in section.comparisons.items():
        ranked = [i for row, i in places.items() if row.is_ranked(protocol)]
        found = standings(pairs, ranked, section.about[metric].lower_is_better)
        for row, standing in zip(places, found, strict=True):
            measures = row.results[protocol].measures
            measures[metric] = replace(measures[metric], standing=standing)
    return section


def _set_names(sections: Sequence[Section]) -> None:
    """Name every section; protocols of one id by the settings that they do not share, too."""
    alike: dict[tuple[str, str], list[dict[str, str]]] = {}
    settings = []
    for section in sections:
        it = section.protocol
        own = leaves_without(section.definition, ("data",))  # without the fingerprints of its data
        settings.append({key: str(value) for key, value in own.items()})
        alike.setdefault((it.kind, it.id), []).append(settings[-1])
    kinds = [section.protocol.kind for section in sections]
    for i, (section, mine) in enumerate(zip(sections, settings, strict=True)):
        it = section.protocol
        others = alike[it.kind, it.id]
        differing = (
            f"{name} {value}"
            for name, value in mine.items()
            if any(other.get(name) != value for other in others)
        )
        said = cut(", ".join(itertools.islice(differing, MAX_DIFFERENCES)))
        section.name = " · ".join(filter(None, (cut(it.id), it.hash, said)))
        section.letter = letter(kinds[:i].count(it.kind)) if kinds.count(it.kind) > 1 else ""


def cut(name: str) -> str:
    """Return a name without the end of a very long one."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"


def letter(index: int) -> str:
    """Return a, b, … z, aa, ab and so on."""
    more, rest = divmod(index, 26)
    return (letter(more - 1) if more else "") + chr(ord("a") + rest)


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
    picks: dict[tuple[Row, tuple[str, ...]], np.ndarray] = {}  # of the seeds of a row
    by_row: dict[Row, list[np.ndarray]] = {}
    for section, ranked in usable:
        columns = []
        for row in ranked:
            # The same seeds are drawn under every protocol that has them: they are the units.
            measure = section.headline(row)
            key, count = (row, measure.replicates), len(measure.values)
            if key not in picks:
                picks[key] = chance.integers(count, size=(DRAWS, count))
            drawn = np.asarray(measure.values)[picks[key]].mean(axis=1)
            columns.append(np.append(measure.mean, drawn))
        sign = 1 if section.protocol.lower_is_better else -1
        values = sign * np.stack(columns)  # (rows, 1 + DRAWS)
        this, other = values[:, None], values[None]
        # Lowest first; equal values share the mean of their ranks.
        ranks = (this > other).sum(1) + ((this == other).sum(1) + 1) / 2
        for row, of_row in zip(ranked, ranks, strict=True):
            by_row.setdefault(row, []).append(of_row)
    found = []
    for row in rows:
        if row in by_row:
            mean, *drawn = np.mean(by_row[row], axis=0).tolist()
            several = any(result.n_pretrain > 1 for result in row.results.values())
            low, high = np.percentile(drawn, [50 * (1 - LEVEL), 50 * (1 + LEVEL)]).tolist()
            found.append(MeanRank(row, mean, len(by_row[row]), (low, high) if several else None))
    return sorted(found, key=lambda it: (-it.protocols, it.mean_rank))


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
