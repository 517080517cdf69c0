"""One HTML file with everything in it: it opens from a disk and loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from kscl.benchmark.leaderboard.columns import COLUMNS, cost_labels, costs, figures
from kscl.benchmark.leaderboard.differences import EXPLANATION, class_means, pairs
from kscl.benchmark.leaderboard.entries import SAME_FOR_ALL_SEEDS
from kscl.benchmark.leaderboard.exports import entry_of, mean_ranks_of, measured
from kscl.benchmark.leaderboard.reading import (
    RANDOM,
    RecordFile,
    curves,
    inside,
    machine,
    mapping,
    number,
    text,
)
from kscl.benchmark.leaderboard.reported import Reported
from kscl.benchmark.leaderboard.rows import WHAT_MEAN_RANKS_ARE, Board, Result, Row, Section, cut
from kscl.benchmark.leaderboard.statistics import THE_TEST
from kscl.benchmark.leaderboard.tables import counts, short_name
from kscl.config import leaves_without
from kscl.records.record import Json, Metric, file_and_line

SCRIPTS = ("table.js", "plots.js", "compare.js", "main.js")
ANSWERS_SHOWN = 6  # above the table; more of them would hide it
PICTURED_ROWS = 3  # of a protocol; the page stays small
CURVE_POINTS = 60
CURVE_RUNS = 5  # of one row; more lines on top of each other show nothing more
DIGITS = 5
BASIS_FILE = "basis.png"  # drawn beside a pretraining's record
MAX_PICTURE_BYTES = 2 * 2**20  # the page stays one that can be mailed
# How a picture starts, from which byte on. An SVG can contain a program, so it is not among them.
PICTURES = {
    "image/png": (b"\x89PNG\r\n\x1a\n", 0),
    "image/jpeg": (b"\xff\xd8\xff", 0),
    "image/webp": (b"WEBP", 8),
}


def page(
    board: Board,
    title: str,
    folder: Path,
    warnings: Sequence[str] = (),
    answers: Sequence[str] = (),
    advice: Sequence[str] = (),
    chart: bytes = b"",
) -> str:
    """Return the page; `folder` is where it will be, and files are linked from there.

    `chart` is a PNG of scores against labels, which the answers say in words.
    """
    style = _part("page.css")
    program = "\n".join(["(() => {", '"use strict";', *map(_part, SCRIPTS), "})();\n"])
    data = json.dumps(page_data(board, folder), separators=(",", ":"), allow_nan=False)
    first, more = answers[:ANSWERS_SHOWN], answers[ANSWERS_SHOWN:]
    opened = f"<details><summary>{len(more)} more</summary>{_paragraphs(more)}</details>"
    alt = "Score against the number of labeled images"
    counts = {"row": len(board.rows), "record": board.records, "protocol": len(board.sections)}
    parts = {
        # The browser refuses whatever is not this style, this program or an embedded picture.
        "policy": (
            f"default-src 'none'; img-src data:; style-src {_digest(style)}; "
            f"script-src {_digest(program)}"
        ),
        "title": html.escape(title),
        "counts": " · ".join(f"{n:,} {word}{'s' * (n != 1)}" for word, n in counts.items()),
        "answer": _paragraphs([*warnings, *first])
        + opened * bool(more)
        + _paragraphs(advice, "quiet")
        + (f'<img class="chart" src="{_uri("image/png", chart)}" alt="{alt}">' if chart else ""),
        "pictures": _pictures(board),
        "notes": _notes(board),
        "style": style,
        # Nothing in the data can end its element.
        "data": data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
        "program": program,
    }
    # One pass over the template, so that no value is searched for another's mark.
    pieces = _part("page.html").split("%%")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _paragraphs(sentences: Sequence[str], style: str = "") -> str:
    start = f'<p class="{style}">' if style else "<p>"
    return "".join(f"{start}{html.escape(sentence)}</p>" for sentence in sentences)


def _pictures(board: Board) -> str:
    """Return what the best rows and random weights predict on test images, by protocol."""
    parts = []
    for section in board.sections:
        found = [
            (row, shown)
            for row, result in zip(section.rows, section.results, strict=True)
            if (shown := _picture(result.records, "pictures"))
        ]
        baseline = [pair for pair in found[PICTURED_ROWS:] if pair[0].entry.method == RANDOM]
        if found:
            parts.append(f"<h3>{html.escape(section.name)}</h3>")
        for row, shown in (*found[:PICTURED_ROWS], *baseline[:1]):
            score = f"{section.headline_label} {section.headline(row).mean:.1f}"
            parts.append(
                f"<figure><figcaption>{html.escape(f'{short_name(row, section.rows)}: {score}')}"
                f'</figcaption><img src="{shown}" alt="The predictions beside the truth"></figure>'
            )
    title = "<h2>Predictions on test images, beside the truth</h2>"
    return f'<section id="pictures">{title}{"".join(parts)}</section>' if parts else ""


def _notes(board: Board) -> str:
    parts = [f"<h2>The test</h2>{_paragraphs([THE_TEST])}"]
    if board.mean_ranks:
        words = _paragraphs([WHAT_MEAN_RANKS_ARE])
        parts.insert(0, f'<h2>Summary over protocols</h2>{words}<div id="ranks"></div>')
    if board.problems:
        lines = "".join(f"<li>{html.escape(problem)}</li>" for problem in board.problems)
        parts.append(f'<h2>Files that were not counted</h2><ul class="problems">{lines}</ul>')
    return "".join(parts)


def _part(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(words: str) -> str:
    digest = hashlib.sha256(words.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


class _Pool(dict[str, int]):
    """Large parts that many records share (configs, libraries), each written once."""

    def put(self, item: object) -> int:
        """Return the index of an item, which is added if it is new."""
        return self.setdefault(json.dumps(item), len(self))


def page_data(board: Board, folder: Path) -> Json:
    """Return what the page's program reads: the rows with everything behind them, each once."""
    pool = _Pool()
    folders = dict.fromkeys(_from_here(folder).rstrip("/") for folder in board.folders)
    return {
        "columns": [
            {key: value for key, value in vars(it).items() if key != "value"}
            for it in COLUMNS.values()
        ],
        "costs": cost_labels(board.rows),
        "folders": shlex.join(folders),
        "intervals": EXPLANATION,
        "protocols": [
            {"name": section.name, "letter": section.letter, **_protocol(section, i, board, pool)}
            for i, section in enumerate(board.sections)
        ],
        "rows": [_row(row, board, Path(os.path.realpath(folder)), pool) for row in board.rows],
        "mean_ranks": mean_ranks_of(board),
        "pool": [json.loads(item) for item in pool],
    }


def _protocol(section: Section, index: int, board: Board, pool: _Pool) -> Json:
    key = section.protocol
    places = {id(row): i for i, row in enumerate(board.rows)}
    rows = [places[id(row)] for row in section.rows]
    return {
        "id": key.id,
        "hash": key.hash,
        "kind": key.kind,
        "stage": section.task.stage,
        "metrics": {
            name: vars(section.about.get(name, Metric(name, "")))
            | {"label": cut(section.label(name)), "further": name in section.further_metrics}
            for name in (*section.metrics, *section.further_metrics)
        },
        "headline": key.headline,
        "definition": pool.put(section.definition),
        "rows": rows,
        "pairs": {f"{rows[it.pop('one')]}-{rows[it.pop('other')]}": it for it in pairs(section)},
        "reported": [_reported(row, index) for row in section.reported],
    }


def _reported(row: Reported, protocol: int) -> Json:
    """Return a published row in the shape of a measured one, as far as it goes."""
    metrics = {
        name: {"mean": mean, "std": row.std.get(name), "verdict": "reported"}
        for name, mean in row.metrics.items()
    }
    result = {"metrics": metrics, "n_pretrain": None, "n_finetune": row.trials, "classes": None}
    return vars(row) | {
        "reported": True,
        "K": row.shots,
        "tag": row.setting,
        "family": f"{row.source} {row.method} {row.epochs} {row.setting}",
        "figures": {"minutes_per_epoch": row.minutes_per_epoch},
        "costs": {},
        "curves": [],
        "results": {protocol: result},
    }


def _row(row: Row, board: Board, folder: Path, pool: _Pool) -> Json:
    n_pretrain, n_finetune = counts(row)
    # Minutes of different machines are not comparable.
    machines = {machine(file.record) for file in row.pretrainings}
    configs = [file.record.config.values for file in row.pretrainings]
    return {
        **entry_of(row),
        "key": row.entry.key,
        "figures": figures(row),
        "costs": costs(row),
        "machine": "several machines" if len(machines) > 1 else "".join(machines),
        # All that can differ between its seeds is left out.
        "settings": pool.put(leaves_without(configs[0], SAME_FOR_ALL_SEEDS)) if configs else None,
        "stale": row.stale,
        "results": {
            i: _result(row.results[section.protocol], section.protocol.headline, row.warnings)
            for i, section in enumerate(board.sections)
            if section.protocol in row.results
        },
        "n_pretrain": n_pretrain,
        "n_finetune": n_finetune,
        "curves": _curves(row.pretrainings),
        "basis": _picture(row.records, "basis_figure", beside=BASIS_FILE),
        "records": [_record(file, folder, pool) for file in row.records],
    }


def _result(result: Result, headline: str, warnings: list[str]) -> Json:
    return {
        "n_pretrain": result.n_pretrain,
        "n_finetune": result.n_finetune,
        "metrics": {name: measured(measure) for name, measure in result.measures.items()},
        "classes": class_means(result, headline) or None,
        "warnings": [*warnings, *result.warnings],
    }


def _curves(pretrainings: list[RecordFile]) -> list[Json]:
    def rounded(values: list[float]) -> list[float]:
        return [float(f"{value:.{DIGITS}g}") for value in values]

    runs = []
    for file in pretrainings[:CURVE_RUNS]:
        axis, series = curves(file.record, CURVE_POINTS)
        lines = {name: [rounded(xs), rounded(ys)] for name, (xs, ys) in series.items()}
        if lines:
            runs.append({"seed": file.record.seed, "axis": axis, "lines": lines})
    return runs


def _record(file: RecordFile, folder: Path, pool: _Pool) -> Json:
    record, details = file.record, file.record.details
    named = sorted(mapping(details.get("files")).items())
    files = [(str(role), file_of(file, name)) for role, name in named]
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
        "command": f"kscl reproduce {shlex.quote(_from_here(file.path, file.shown))}",
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


def _link(path: Path, folder: Path) -> str:
    """Return the link from the page to a file: always a relative path, never a scheme."""
    try:
        relative = os.path.relpath(os.path.realpath(path), folder)
    except ValueError:  # another drive
        return ""
    return quote(f"./{Path(relative).as_posix()}".encode(errors="surrogateescape"))


def _picture(files: Sequence[RecordFile], key: str, beside: str | None = None) -> str | None:
    """Return the first picture that a record names under `key`, as a data URI.

    A pretraining's record that names none may have the picture `beside` it.
    """
    for file in files:
        default = beside if file.record.kind == "pretrain" else None
        path = file_of(file, text(file.record.details.get(key)) or default)
        try:
            if path is None or path.stat().st_size > MAX_PICTURE_BYTES:
                continue
            content = path.read_bytes()
        except OSError:
            continue
        for kind, (start, offset) in PICTURES.items():
            if content[offset:].startswith(start):
                return _uri(kind, content)
    return None


def file_of(file: RecordFile, name: object) -> Path | None:
    """Return a file that a record names, if it exists and is inside the folder that was read."""
    if (words := text(name)) is None:
        return None
    try:
        path = Path(os.path.realpath(file.path.parent / words))
        is_ours = path.is_relative_to(os.path.realpath(file.root)) and path.is_file()
    except (OSError, ValueError):  # such as a null character in the name
        return None
    return path if is_ours else None
