"""What the page knows: the rows with all that stands behind them, each thing once."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from urllib.parse import quote

from kscl.benchmark.leaderboard import cells
from kscl.benchmark.leaderboard.details import (
    curves,
    inside,
    mapping,
    number,
    per_class,
    text,
    thinned,
)
from kscl.benchmark.leaderboard.exports import contender, measured
from kscl.benchmark.leaderboard.figures import basis_figure, file_of
from kscl.benchmark.leaderboard.reading import Loaded
from kscl.benchmark.leaderboard.rows import FIGURES, HEADLINE, METRICS, Board, Result, Row, Section
from kscl.benchmark.leaderboard.statistics import THE_TEST
from kscl.records.record import Json

CURVE_POINTS = 60
CURVE_RUNS = 5  # of one row; more lines over each other show nothing more
DIGITS = 5


@dataclass
class _Pool:
    """Large parts that many records share (configs, libraries) are written once, by number."""

    items: list[object] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)

    def put(self, item: object) -> int:
        key = json.dumps(item, sort_keys=True)
        if key not in self.places:
            self.places[key] = len(self.items)
            self.items.append(item)
        return self.places[key]


def page_data(board: Board, title: str, folder: Path) -> Json:
    """`folder` is where the page will lie: files are linked from there."""
    pool = _Pool()
    letters = cells.section_letters(board.sections)
    return {
        "title": title,
        "test": THE_TEST,
        "records": board.records,
        "figures": {name: cells.FIGURE_LABELS[name] for name in FIGURES},
        "protocols": [
            _protocol(section, name, letter, pool)
            for section, name, letter in zip(
                board.sections, cells.section_names(board.sections), letters, strict=True
            )
        ],
        "rows": [_row(row, board, folder.resolve(), pool) for row in board.rows],
        "problems": board.problems,
        "pool": pool.items,
    }


def _protocol(section: Section, name: str, letter: str, pool: _Pool) -> Json:
    kind = section.protocol.kind
    return {
        "id": section.protocol.id,
        "hash": section.protocol.hash,
        "kind": kind,
        "name": name,
        "letter": letter,
        "metrics": list(METRICS[kind]),
        "labels": [cells.METRIC_LABELS[kind, metric] for metric in METRICS[kind]],
        "headline": HEADLINE[kind],
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


def _row(row: Row, board: Board, folder: Path, pool: _Pool) -> Json:
    places = {section.protocol: i for i, section in enumerate(board.sections)}
    return {
        **contender(row),
        "figures": row.figures,
        "machine": _machine(row.pretrainings),
        "stale": row.stale,
        "results": {
            places[protocol]: _result(result, HEADLINE[protocol.kind])
            for protocol, result in row.results.items()
        },
        "n_pretrain": cells.n_pretrain(row),
        "n_finetune": cells.n_finetune(row),
        "curves": _curves(row.pretrainings),
        "basis": next(filter(None, map(basis_figure, row.records)), None),
        "records": [_record(loaded, folder, pool) for loaded in row.records],
    }


def _result(result: Result, headline: str) -> Json:
    classes: dict[str, list[float]] = {}
    for loaded in result.records:
        for name, value in per_class(loaded.record, headline).items():
            classes.setdefault(name, []).append(value)
    return {
        "n_pretrain": result.n_pretrain,
        "n_finetune": result.n_finetune,
        "metrics": {name: measured(measure) for name, measure in result.measures.items()},
        "classes": {name: fmean(values) for name, values in classes.items()},
    }


def _curves(pretrainings: list[Loaded]) -> list[Json]:
    runs = []
    for loaded in pretrainings[:CURVE_RUNS]:
        axis, series = curves(loaded.record)
        lines = {name: thinned(values, CURVE_POINTS) for name, values in series.items()}
        if lines:
            rounded = {name: [_rounded(xs), _rounded(ys)] for name, (xs, ys) in lines.items()}
            runs.append({"seed": loaded.record["seed"], "axis": axis, "lines": rounded})
    return runs


def _rounded(values: list[float]) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values]


def _machine(pretrainings: list[Loaded]) -> str:
    """What the cost was measured on: minutes of different machines are not one scale."""
    names = {machine(loaded.record) for loaded in pretrainings}
    return names.pop() if len(names) == 1 else "several machines" if names else ""


def machine(record: Json) -> str:
    hardware = mapping(record["hardware"])
    gpus = hardware.get("gpus")
    if isinstance(gpus, list) and gpus:
        return f"{len(gpus)} x {gpus[0]}"
    return f"{hardware.get('cores', '?')} cores, {hardware.get('cpu', 'unknown CPU')}"


def _record(loaded: Loaded, folder: Path, pool: _Pool) -> Json:
    record = loaded.record
    details = record["details"]
    files = [(str(role), file_of(loaded, name)) for role, name in _files(details)]
    return {
        **{name: record[name] for name in ("id", "kind", "name", "created", "seconds", "seed")},
        "metrics": record["metrics"],
        "data": {role: _print(given) for role, given in record["data"].items()},
        "inputs": record["inputs"],
        "outputs": mapping(details.get("outputs")),
        "protocol": f"{record['protocol']['id']} · {record['protocol']['hash']}",
        "code": pool.put(_code(record["code"])),
        "config": pool.put(record["config"]),
        "libraries": pool.put(record["libraries"]),
        "hardware": pool.put(record["hardware"]),
        "certificate": pool.put(details["certificate"]) if "certificate" in details else None,
        "file": {"shown": loaded.shown, "link": _link(loaded.path, folder)},
        "files": [{"shown": role, "link": _link(path, folder)} for role, path in files if path],
    }


def _print(given: object) -> Json:
    """A fingerprint in the shape that the page expects, whatever stood in the record."""
    words = {name: text(inside(given, name)) for name in ("hash", "path")}
    return words | {"files": number(inside(given, "files"))}


def _code(given: Json) -> Json:
    words = {name: text(given[name]) for name in ("version", "commit", "source_hash")}
    return words | {"dirty": given["dirty"] is True}


def _files(details: Json) -> list[tuple[str, object]]:
    return sorted(mapping(details.get("files")).items())


def _link(path: Path, folder: Path) -> str:
    """From the page to a file: always a relative path, never a scheme."""
    try:
        relative = os.path.relpath(path.resolve(), folder)
    except ValueError:  # another drive
        return ""
    return quote(f"./{Path(relative).as_posix()}".encode(errors="surrogateescape"))
