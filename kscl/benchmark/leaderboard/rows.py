"""Records → the board: one row per entry, with its result under each protocol, best first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from kscl.benchmark.leaderboard.aggregate import mean_ranks
from kscl.benchmark.leaderboard.board import (
    FIGURES,
    Board,
    ProtocolKey,
    Result,
    Row,
    Section,
    TrialRecords,
)
from kscl.benchmark.leaderboard.linking import Entry, Link, links
from kscl.benchmark.leaderboard.measures import measures_of
from kscl.benchmark.leaderboard.reading import RecordFile, read_folders
from kscl.benchmark.leaderboard.reported import reported_rows
from kscl.benchmark.leaderboard.stale import stale_reasons
from kscl.benchmark.leaderboard.statistics import standings
from kscl.benchmark.leaderboard.tags import tags
from kscl.benchmark.leaderboard.usable import is_ranked


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
    summary = mean_ranks(rows, sections)
    names = [str(folder) for folder in folders]
    return Board(rows, sections, summary, reading.problems, len(reading.records), names)


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
        result.measures = dict(measures_of(result, protocol))
        rows[entry].results[protocol] = result
    for row in rows.values():
        row.pretrainings.sort(key=lambda file: file.record.seed)
        row.figures = _figures(row.pretrainings)
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
    seed = file.record.seed
    # Detectron2's seed -1 means "any": two such runs are two trials.
    return found.replicate, str(seed) if seed >= 0 else file.id


def _trial_order(key: tuple[str, str]) -> tuple[int, str, int, str]:
    replicate, trial = key
    return len(replicate), replicate, len(trial), trial  # seed 9 before seed 10


def _figures(pretrainings: Sequence[RecordFile]) -> dict[str, float]:
    found = {}
    for name in FIGURES:
        metrics = (file.record.metrics for file in pretrainings)
        values = [values[name] for values in metrics if name in values]
        if values:
            found[name] = fmean(values)
    return found


def _section(protocol: ProtocolKey, rows: Sequence[Row], with_reported: bool) -> Section:
    mine = [row for row in rows if protocol in row.results]
    files = [file for row in mine for file in row.results[protocol].records]
    sign = 1 if protocol.lower_is_better else -1

    def order(row: Row) -> tuple[float, tuple[object, ...]]:
        return sign * row.results[protocol].measures[protocol.headline].mean, row.entry.order

    definition = files[0].record.protocol.definition
    reported = reported_rows(protocol.id) if with_reported else []
    section = Section(protocol, definition, sorted(mine, key=order), reported)
    for metric, about in section.about.items():
        having, pairs = section.compared(metric)
        ranked = [i for i, row in enumerate(having) if is_ranked(row, protocol)]
        for row, standing in zip(
            having, standings(pairs, ranked, about.lower_is_better), strict=True
        ):
            measures = row.results[protocol].measures
            measures[metric] = replace(measures[metric], standing=standing)
    return section
