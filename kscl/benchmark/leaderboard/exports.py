"""The board for other programs: CSV with a line for each row and protocol, JSON with all of it."""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence

from kscl.benchmark.leaderboard.columns import COLUMNS, cost_labels, costs, figures
from kscl.benchmark.leaderboard.differences import named_rows
from kscl.benchmark.leaderboard.reported import Reported
from kscl.benchmark.leaderboard.rows import Board, Measure, Result, Row, Section
from kscl.benchmark.leaderboard.statistics import ALPHA, LEVEL, THE_TEST
from kscl.benchmark.leaderboard.tables import backbone
from kscl.records.record import Json

VERSION = 1
# What starts a formula, in ASCII and full width, at the start of a cell or behind anything that one
# program or another ends a cell with.
FORMULA = re.compile(r"""((?:^|[\x00-\x1f\x7f-\x9f\u2028\u2029"'`;|])\s*)([=+\-@＝＋－＠])""")


def csv_columns(board: Board, baselines: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the header: of metrics and differences to a baseline, those that some row has."""
    shown = [metric for section in board.sections for metric in section.metrics]
    metrics = dict.fromkeys([*shown, *(m for s in board.sections for m in s.further_metrics)])
    named = {name for section in board.sections for name in _baselines(section, baselines)}
    return (
        *("kind", "protocol_id", "protocol_hash", "source", "rank", "verdict", "p_holm"),
        *("method", "tag", "backbone", "epochs", "K", "rho", "config_hash"),
        *(f"{metric}{part}" for metric in metrics for part in ("", "_std", "_low", "_high")),
        *("interval", *COLUMNS, *_costs_of(board), "n_pretrain", "n_finetune", "warnings", "stale"),
        *(name for it in baselines if it in named for name in _difference_columns(it)),
    )


def _metrics(section: Section) -> tuple[str, ...]:
    return *section.metrics, *section.further_metrics


def _baselines(section: Section, baselines: Sequence[str]) -> dict[str, Row]:
    """Return the row of every baseline that fits just one of a protocol."""
    found = {name: named_rows(section.rows, name) for name in baselines}
    return {name: rows[0] for name, rows in found.items() if len(rows) == 1}


def _difference_columns(baseline: str) -> list[str]:
    """Return the columns of the headline's difference to a row and of its interval over seeds."""
    return [f"difference_to_{_harmless(baseline)}{part}" for part in ("", "_low", "_high")]


def _differences(row: Row, section: Section, baselines: Mapping[str, Row]) -> Json:
    line: Json = {}
    for baseline, to in baselines.items():
        if to is not row:
            found = section.test(row, to)
            low, high = found.interval if found else (None, None)
            values = (section.headline(row).mean - section.headline(to).mean, low, high)
            line |= dict(zip(_difference_columns(baseline), values, strict=True))
    return line


def _costs_of(board: Board) -> list[str]:
    found = {name for row in board.rows for name in costs(row)}
    return [name for name in cost_labels(board.rows) if name in found]


def as_csv(board: Board, baselines: Sequence[str] = ()) -> str:
    """Return the board as CSV that no spreadsheet runs as a program."""
    out = io.StringIO()
    writer = csv.DictWriter(out, csv_columns(board, baselines), restval="", lineterminator="\n")
    writer.writeheader()
    for section in board.sections:
        compared = _baselines(section, baselines)
        writer.writerows(
            _csv_line(row, section) | _differences(row, section, compared) for row in section.rows
        )
        writer.writerows(_reported_line(row, section) for row in section.reported)
    return out.getvalue()


def _csv_line(row: Row, section: Section) -> Json:
    result = section.result(row)
    line = _protocol(section) | {
        "source": "measured",
        "method": row.entry.method,
        "tag": row.tag,
        "backbone": backbone(row),
        "epochs": row.entry.epochs,
        "K": row.entry.shots,
        "rho": row.entry.rho,
        "config_hash": row.entry.config,
        **figures(row),
        **costs(row),
        "n_pretrain": result.n_pretrain,
        "n_finetune": result.n_finetune,
        "warnings": "; ".join([*row.warnings, *result.warnings]),
        "stale": "; ".join(row.stale),
    }
    for metric in _metrics(section):
        measure = result.measures.get(metric)
        if measure:
            low, high = measure.interval or (None, None)
            line |= {metric: measure.mean, f"{metric}_std": measure.std}
            line |= {f"{metric}_low": low, f"{metric}_high": high}
    headline = section.headline(row)
    line |= {"rank": headline.standing.rank, "verdict": headline.standing.verdict}
    line |= {"p_holm": headline.standing.p, "interval": headline.interval_is}
    return {key: _harmless(value) for key, value in line.items()}


def _reported_line(row: Reported, section: Section) -> Json:
    line = _protocol(section) | {
        "source": f"reported: {row.source}",
        "method": row.method,
        "tag": row.setting,
        "backbone": row.backbone,
        "epochs": row.epochs,
        "K": row.shots,
        "rho": row.rho,
        "minutes_per_epoch": row.minutes_per_epoch,
        **row.metrics,
        **{f"{metric}_std": value for metric, value in row.std.items()},
    }
    return {key: _harmless(value) for key, value in line.items()}


def _protocol(section: Section) -> Json:
    it = section.protocol
    return {"kind": it.kind, "protocol_id": it.id, "protocol_hash": it.hash}


def _harmless(value: object) -> object:
    """Return text that a spreadsheet takes for text, whatever separators it reads cells by.

    A cell that starts like a formula is run. A quote before the trigger keeps it text; line ends
    and other controls, with which a name could begin a cell of its own, become spaces.
    """
    if not isinstance(value, str):
        return value
    quoted = FORMULA.sub(r"\1'\2", value)
    return "".join(c if unicodedata.category(c)[0] not in "CZ" else " " for c in quoted)


def as_json(board: Board, title: str, answer: Json | None = None) -> str:
    """Return the board as JSON, with every value and the ids of its records."""
    indices = {id(row): i for i, row in enumerate(board.rows)}
    content = {
        "schema": "kscl-leaderboard",
        "version": VERSION,
        "title": title,
        **(answer or {"answers": [], "advice": [], "warnings": []}),
        "records": board.records,
        "test": {"words": THE_TEST, "alpha": ALPHA, "interval_level": LEVEL},
        "rows": [_row(row, board) for row in board.rows],
        "protocols": [
            {
                **_protocol(section),
                "name": section.name,
                "definition": section.definition,
                "headline": section.protocol.headline,
                "columns": list(section.metrics),
                "rows": [indices[id(row)] for row in section.rows],
                "reported": [vars(row) for row in section.reported],
            }
            for section in board.sections
        ],
        "summary": mean_ranks_of(board),
        "problems": board.problems,
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def mean_ranks_of(board: Board) -> list[Json]:
    """Return the mean ranks, each with the index of its row."""
    indices = {id(row): i for i, row in enumerate(board.rows)}
    return [vars(it) | {"row": indices[id(it.row)]} for it in board.mean_ranks]


def _row(row: Row, board: Board) -> Json:
    return {
        **entry_of(row),
        "figures": figures(row),
        "costs": costs(row),
        "stale": row.stale,
        "warnings": row.warnings,
        "pretraining": [file.id for file in row.pretrainings],
        "results": [
            {"protocol": i, **_result(section.result(row))}
            for i, section in enumerate(board.sections)
            if section.protocol in row.results
        ],
    }


def entry_of(row: Row) -> Json:
    """Return what is compared in a row."""
    it = row.entry
    return {
        "method": it.method,
        "backbone": backbone(row),
        "epochs": it.epochs,
        "K": it.shots,
        "rho": it.rho,
        "tag": row.tag,
        "config": it.config,
        "data": it.data,
        "family": it.family,
    }


def _result(result: Result) -> Json:
    return {
        "n_pretrain": result.n_pretrain,
        "n_finetune": result.n_finetune,
        "records": [file.id for file in result.records],
        "warnings": result.warnings,
        "metrics": {name: measured(measure) for name, measure in result.measures.items()},
    }


def measured(measure: Measure) -> Json:
    """Return one metric of one row with all that follows from its values."""
    own = {key: value for key, value in vars(measure).items() if key != "standing"}
    return own | vars(measure.standing)
