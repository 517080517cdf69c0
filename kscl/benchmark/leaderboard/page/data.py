"""What the page knows: the rows with everything behind them, each thing once."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from kscl.benchmark.leaderboard.aggregate import WHAT_IT_IS
from kscl.benchmark.leaderboard.board import FIGURES, Board, Result, Row, Section
from kscl.benchmark.leaderboard.details import (
    curves,
    inside,
    machine,
    mapping,
    number,
    text,
    thinned,
)
from kscl.benchmark.leaderboard.linking import SAME_FOR_ALL_SEEDS
from kscl.benchmark.leaderboard.page.figures import basis_figure, file_of
from kscl.benchmark.leaderboard.reading import RecordFile
from kscl.benchmark.leaderboard.statistics import THE_TEST
from kscl.benchmark.leaderboard.writing import cells, spent
from kscl.benchmark.leaderboard.writing.compare import class_means, pairs
from kscl.benchmark.leaderboard.writing.differences import EXPLANATION
from kscl.benchmark.leaderboard.writing.exports import entry_of, measured
from kscl.records.record import Json, file_and_line

CURVE_POINTS = 60
CURVE_RUNS = 5  # of one row; more lines on top of each other show nothing more
DIGITS = 5


@dataclass
class _Pool:
    """Large parts that many records share (configs, libraries), each written once."""

    items: list[object] = field(default_factory=list)
    indices: dict[str, int] = field(default_factory=dict)

    def put(self, item: object) -> int:
        """Return the index of an item, which is added if it is new."""
        key = json.dumps(item, sort_keys=True)
        if key not in self.indices:
            self.indices[key] = len(self.items)
            self.items.append(item)
        return self.indices[key]


def page_data(board: Board, title: str, folder: Path) -> Json:
    """Return the page's data; files are linked from `folder`, where the page will be."""
    pool = _Pool()
    letters = cells.section_letters(board.sections)
    folders = dict.fromkeys(_from_here(folder).rstrip("/") for folder in board.folders)
    return {
        "title": title,
        "test": THE_TEST,
        "records": board.records,
        "figures": {name: cells.FIGURE_LABELS[name] for name in FIGURES},
        "costs": spent.labels(board.rows),
        "not_compared": list(SAME_FOR_ALL_SEEDS),
        "board_command": f"python tools/leaderboard.py {shlex.join(folders)}",
        "intervals": EXPLANATION,
        "protocols": [
            _protocol(section, name, letter, pool) | _pairs(section, board)
            for section, name, letter in zip(
                board.sections, cells.section_names(board.sections), letters, strict=True
            )
        ],
        "rows": [_row(row, board, Path(os.path.realpath(folder)), pool) for row in board.rows],
        "summary": {"words": WHAT_IT_IS, "rows": _summary(board)},
        "problems": board.problems,
        "pool": pool.items,
    }


def _protocol(section: Section, name: str, letter: str, pool: _Pool) -> Json:
    return {
        "id": section.protocol.id,
        "hash": section.protocol.hash,
        "kind": section.protocol.kind,
        "stage": section.task.stage,
        "name": name,
        "letter": letter,
        "metrics": list(section.metrics),
        "labels": cells.metric_labels(section),
        "further_metrics": list(section.further_metrics),
        "headline": section.protocol.headline,
        "definition": pool.put(section.definition),
        "reported": [
            vars(row)
            | {
                "K": row.shots,
                "figures": {"minutes_per_epoch": row.minutes_per_epoch},
                "tag": row.setting,
                "family": f"{row.source} {row.method} {row.epochs} {row.setting}",
            }
            for row in section.reported
        ],
    }


def _summary(board: Board) -> list[Json]:
    indices = {id(row): i for i, row in enumerate(board.rows)}
    return [
        {"row": indices[id(it.row)], "mean": it.mean, "interval": it.interval, "n": it.protocols}
        for it in board.mean_ranks
    ]


def _pairs(section: Section, board: Board) -> Json:
    """Return what two rows differ by, found by their indices among all rows of the page."""
    indices = {id(row): i for i, row in enumerate(board.rows)}
    rows = [indices[id(row)] for row in section.rows]
    found = pairs(section)
    return {"pairs": {f"{rows[it.pop('one')]}-{rows[it.pop('other')]}": it for it in found}}


def _row(row: Row, board: Board, folder: Path, pool: _Pool) -> Json:
    indices = {section.protocol: i for i, section in enumerate(board.sections)}
    return {
        **entry_of(row),
        "key": row.entry.key,
        "figures": row.figures,
        "costs": spent.spent(row),
        "machine": _machine(row.pretrainings),
        "stale": row.stale,
        "results": {
            indices[protocol]: _result(result, protocol.headline, row.doubts)
            for protocol, result in row.results.items()
        },
        "n_pretrain": cells.n_pretrain(row),
        "n_finetune": cells.n_finetune(row),
        "curves": _curves(row.pretrainings),
        "basis": next(filter(None, map(basis_figure, row.records)), None),
        "records": [_record(file, folder, pool) for file in row.records],
    }


def _result(result: Result, headline: str, doubts: list[str]) -> Json:
    return {
        "n_pretrain": result.n_pretrain,
        "n_finetune": result.n_finetune,
        "metrics": {name: measured(measure) for name, measure in result.measures.items()},
        "classes": class_means(result, headline),
        "warnings": [*doubts, *result.warnings],
    }


def _curves(pretrainings: list[RecordFile]) -> list[Json]:
    runs = []
    for file in pretrainings[:CURVE_RUNS]:
        axis, series = curves(file.record)
        lines = {name: thinned(values, CURVE_POINTS) for name, values in series.items()}
        if lines:
            rounded = {name: [_rounded(xs), _rounded(ys)] for name, (xs, ys) in lines.items()}
            runs.append({"seed": file.record.seed, "axis": axis, "lines": rounded})
    return runs


def _rounded(values: list[float]) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values]


def _machine(pretrainings: list[RecordFile]) -> str:
    """Name what the cost was measured on: minutes of different machines are not comparable."""
    names = {machine(file.record) for file in pretrainings}
    return names.pop() if len(names) == 1 else "several machines" if names else ""


def _record(file: RecordFile, folder: Path, pool: _Pool) -> Json:
    record = file.record
    details = record.details
    files = [(str(role), file_of(file, name)) for role, name in _files(details)]
    return {
        **{name: record[name] for name in ("id", "kind", "name", "created", "seconds", "seed")},
        "metrics": record.metrics,
        "data": {role: _print(given) for role, given in record.data.items()},
        "inputs": record.inputs,
        "outputs": mapping(details.get("outputs")),
        "protocol": f"{record.protocol.id} · {record.protocol.hash}",
        "code": pool.put(vars(record.code)),
        "config": pool.put(vars(record.config)),
        "libraries": pool.put(record.libraries),
        "hardware": pool.put(record.hardware),
        "certificate": pool.put(details["certificate"]) if "certificate" in details else None,
        "file": {"shown": file.shown, "link": _link(file_and_line(file.path)[0], folder)},
        "command": f"python tools/reproduce.py {shlex.quote(_from_here(file.path, file.shown))}",
        "files": [{"shown": role, "link": _link(path, folder)} for role, path in files if path],
    }


def _from_here(path: Path | str, shown: str = "") -> str:
    """Return a path for a command; one outside the working folder is its reader's to fill in."""
    relative = os.path.relpath(path)
    return os.path.join("FOLDER", shown) if relative.startswith("..") else relative


def _print(given: object) -> Json:
    """Return a fingerprint in the shape that the page expects, whatever the record contains."""
    words = {name: text(inside(given, name)) for name in ("hash", "path")}
    return words | {"files": number(inside(given, "files"))}


def _files(details: Json) -> list[tuple[str, object]]:
    return sorted(mapping(details.get("files")).items())


def _link(path: Path, folder: Path) -> str:
    """Return the link from the page to a file: always a relative path, never a scheme."""
    try:
        relative = os.path.relpath(os.path.realpath(path), folder)
    except ValueError:  # another drive
        return ""
    return quote(f"./{Path(relative).as_posix()}".encode(errors="surrogateescape"))
