"""The board in a terminal: one compact table, then the answer, on one screen."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from kscl.benchmark.leaderboard.columns import costs, shown
from kscl.benchmark.leaderboard.reading import RANDOM
from kscl.benchmark.leaderboard.rows import Board, Row, Section
from kscl.benchmark.leaderboard.tables import backbone, percent, short
from kscl.errors import printable
from kscl.records.spread import number_and_spread

WIDTH = 100  # columns
LINES = 20  # of all that is returned; the caller adds where the files are, and equal time
MAX_ROWS = 8
NAME = 28  # characters of a method's or a backbone's name
MARKS = {"best": " *", "not distinguishable": " ≈"}


@dataclass(frozen=True)
class _Column:
    label: str
    value: Callable[[Row], str]
    worth: int  # the least worthy columns are left out where there is no room
    is_setting: bool = False  # said once if all rows agree


def summary(
    board: Board, warnings: Sequence[str], answers: Sequence[str], advice: Sequence[str]
) -> str:
    """Return at most LINES lines of at most WIDTH columns: the table, then the sentences."""
    table, caption = _table(board)
    closing = [line for it in advice for line in _wrapped(it)]
    room = LINES - len(table) - len(caption) - len(closing) - 1
    wanted = sum(len(_wrapped(it)) for it in answers)
    said = _fitting(warnings, max(3, room // 3, room - wanted), "warning") if warnings else []
    said += _fitting(answers, room - len(said), "answer")
    return "\n".join([*table, *caption, "", *said, *closing]).rstrip() + "\n"


def _table(board: Board) -> tuple[list[str], list[str]]:
    """Return the lines of the table, and those about it."""
    columns, shared = _varying(_columns(board), board.rows)
    rows = _shown(board.rows)
    lines = _drawn(columns, rows)
    while len(columns) > 2 and max(map(len, lines)) > WIDTH:
        least = min(column.worth for column in columns)
        columns = [column for column in columns if column.worth > least]
        lines = _drawn(columns, rows)
    body, more = "".join(lines[2:]), len(board.rows) - len(rows)
    labels = [column.label for column in columns]
    about = [
        f"{more} more rows are on the page." if more else "",
        f"All rows: {', '.join(shared)}." if shared else "",
        _protocols(board.sections, labels),
        "±: standard deviation over seeds." if "±" in body else "",
        "*: best row that was tested." if "*" in body else "",
        "≈: not distinguishable from it." if "≈" in body else "",
    ]
    return [line[:WIDTH] for line in lines], _wrapped(" ".join(filter(None, about)), 3)


def _drawn(columns: Sequence[_Column], rows: Sequence[Row]) -> list[str]:
    cells = [[column.value(row) for column in columns] for row in rows]
    sides = ["left" if column.label in ("method", "backbone") else "right" for column in columns]
    labels = [column.label for column in columns]
    drawn = tabulate(cells, labels, "simple", colalign=sides, disable_numparse=True)
    return [line.rstrip() for line in drawn.splitlines()]


def _columns(board: Board) -> list[_Column]:
    """Return all columns in their order."""
    columns = [
        _Column("method", lambda row: _cut(_method(row)), 9),
        _Column("backbone", lambda row: printable(backbone(row)), 0, is_setting=True),
        _Column("K", lambda row: short(row.entry.shots), 6, is_setting=True),
        _Column("ρ", lambda row: percent(row.entry.rho), 2, is_setting=True),
        _Column("epochs", lambda row: short(row.entry.epochs), 5, is_setting=True),
    ]
    for section in board.sections:
        for name, metric in section.about.items():
            # AP50 says whether a detector works at all, so it stands beside AP.
            if name in section.metrics and (metric.headline or metric.working_from is not None):
                worth = 8 if metric.headline else 3
                columns.append(_Column(_label(section, name), _value(section, name), worth))
    return [*columns, _Column("min", lambda row: shown(costs(row).get("pretrain_minutes"), 1), 4)]


def _varying(columns: list[_Column], rows: Sequence[Row]) -> tuple[list[_Column], list[str]]:
    """Return the columns that say something, and the settings that all rows share, in words."""
    kept, shared = [], []
    for column in columns:
        values = {column.value(row) for row in rows}
        if values == {""}:
            continue
        if column.is_setting and len(values) == 1:
            shared.append(f"{column.label} {values.pop()}")
        else:
            kept.append(column)
    return kept, shared


def _value(section: Section, metric: str) -> Callable[[Row], str]:
    measures = [it.measures[metric] for it in section.results if metric in it.measures]
    unmarked = "  " if any(it.standing.verdict in MARKS for it in measures) else ""

    def cell(row: Row) -> str:
        result = row.results.get(section.protocol)
        measure = result.measures.get(metric) if result else None
        if measure is None:
            return ""
        said = number_and_spread(measure.mean, measure.std, digits=1)
        return said + MARKS.get(measure.standing.verdict, unmarked)

    return cell


def _shown(rows: Sequence[Row]) -> list[Row]:
    """Return the best rows, and random weights however poor they are."""
    random = [row for row in rows[MAX_ROWS:] if row.entry.method == RANDOM][:1]
    return [*rows[: MAX_ROWS - len(random)], *random]


def _protocols(sections: Sequence[Section], labels: Sequence[str]) -> str:
    """Return which protocol the headlines with a letter are measured under."""
    named = [
        f"{label} is {_cut(section.protocol.id)}"
        for section in sections
        if section.letter and (label := _label(section, section.protocol.headline)) in labels
    ]
    return f"{', '.join(named)}." if named else ""


def _label(section: Section, metric: str) -> str:
    return _cut(section.label(metric)) + (f" ({section.letter})" if section.letter else "")


def _method(row: Row) -> str:
    return f"{row.entry.method} ({row.tag})" if row.tag else row.entry.method


def _cut(name: str) -> str:
    name = printable(name)
    return name if len(name) <= NAME else f"{name[: NAME - 1]}…"


def _fitting(sentences: Sequence[str], room: int, what: str) -> list[str]:
    """Return as many sentences as fit, the first at any rate, and how many more there are."""
    paragraphs = [_wrapped(it) for it in dict.fromkeys(sentences)]
    lines: list[str] = []
    for number, paragraph in enumerate(paragraphs):
        rest = len(paragraphs) - number
        if len(lines) + len(paragraph) + (rest > 1) > room:
            first = [] if lines else _wrapped(sentences[0], room - (rest > 1))
            left = rest - bool(first)
            more = f"{left} more {what}{'s' if left > 1 else ''} on the page."
            return [*lines, *first, *([more] if left else [])]
        lines += paragraph
    return lines


def _wrapped(sentence: str, lines: int | None = None) -> list[str]:
    return textwrap.wrap(printable(sentence), WIDTH, max_lines=lines, placeholder=" …")


def wrapped(document: str) -> str:
    """Return Markdown whose prose is no wider than a terminal; tables stay as they are."""
    lines = document.split("\n")
    return "\n".join(it if it.startswith("|") else "\n".join(_wrapped(it)) for it in lines)


def first_of_each(answers: Iterable[tuple[str, str]]) -> list[str]:
    """Return (protocol, sentence) pairs so that every protocol's first sentence comes first."""
    seen: dict[str, int] = {}
    placed = []
    for protocol, sentence in answers:
        seen[protocol] = seen.get(protocol, -1) + 1
        placed.append((seen[protocol], sentence))
    return [sentence for _, sentence in sorted(placed, key=lambda it: it[0])]
