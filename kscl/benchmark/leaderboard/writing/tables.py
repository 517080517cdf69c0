"""The board as Markdown: one table over all protocols, then each protocol ranked separately."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from tabulate import tabulate

from kscl.benchmark.leaderboard.aggregate import WHAT_IT_IS
from kscl.benchmark.leaderboard.board import (
    FIGURES,
    OVER_TRIALS,
    TEST_SAMPLING,
    Board,
    MeanRank,
    Measure,
    Row,
    Section,
)
from kscl.benchmark.leaderboard.reported import Reported
from kscl.benchmark.leaderboard.statistics import THE_TEST
from kscl.benchmark.leaderboard.writing import cells, spent
from kscl.errors import KsclError
from kscl.records.spread import number_and_spread

IDENTITY = ["method", "backbone", "epochs", "K", "ρ"]
COUNTS = ["n_pretrain", "n_finetune"]
TEXT_COLUMNS = (
    *("method", "backbone", "mark", "note", "source", "95 % interval"),
    *("row", "class", "setting"),
)
SPECIAL = r"[\\`*_{}\[\]|~#!]"  # starts markup in Markdown unless a backslash is before it
CELL = r"(?:[^|\\]|\\.)+"  # of a table

SHORT_LEGEND = (
    "Mean ± standard deviation over pretraining seeds. **Bold**: the best row of the column's "
    "protocol that was tested; ≈: not distinguishable from it"
)
LEGEND = (
    f"{SHORT_LEGEND}; °: over trials on one backbone; "
    "†: 95 % interval of a single trial, test sampling only."
)


def markdown(board: Board, title: str, first: Sequence[str] = (), last: Sequence[str] = ()) -> str:
    """Return the whole board in Markdown, with parts before and after the tables."""
    parts = [f"# {text(title)}", *first, _summary(board), "## Overview", overview(board), LEGEND]
    if board.sections:
        parts.append(_column_key(board.sections))
    for section, name in zip(board.sections, cells.section_names(board.sections), strict=True):
        parts += [f"## {text(name)}", _section_table(section)]
        if section.reported:
            parts += [
                "Reported elsewhere (published figures: not ranked, not tested):",
                _reported_table(section),
            ]
    if board.mean_ranks:
        table_of_ranks = summary_table(board.mean_ranks)
        parts += ["## Summary over protocols", table_of_ranks, text(WHAT_IT_IS)]
    if board.rows:
        parts += ["## Costs", cost_table(board.rows), text(spent.EXPLANATION)]
    parts += [*last, "## The test", text(THE_TEST)]
    stale = [(row, reason) for row in board.rows for reason in row.stale]
    if stale:
        lines = [f"- {text(cells.name(row))}: {text(reason)}" for row, reason in stale]
        parts += ["## Stale rows", "\n".join(lines)]
    if board.problems:
        lines = [f"- {text(problem)}" for problem in board.problems]
        parts += ["## Files that were not counted", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def overview(board: Board) -> str:
    """Return the table over all protocols."""
    return table(*overview_cells(board))


def overview_cells(board: Board) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: one row per entry; every metric column has exactly one protocol."""
    letters = cells.section_letters(board.sections)
    metric_columns = [
        label
        for section, letter in zip(board.sections, letters, strict=True)
        for label in cells.metric_labels(section, letter)
    ]
    header = [*IDENTITY, *metric_columns, *map(cells.FIGURE_LABELS.get, FIGURES), *COUNTS, "mark"]
    lines = []
    for row in board.rows:
        values = [
            _value(_measure(row, section, metric), section.about[metric].digits)
            for section in board.sections
            for metric in section.metrics
        ]
        counts = [cells.n_pretrain(row), cells.n_finetune(row)]
        words = [text(cells.warning(row)), "stale" if row.stale else ""]
        mark = ", ".join(filter(None, words))
        lines.append([*identity(row), *values, *cells.figures(row), *counts, mark])
    return [str(name) for name in header], lines


def chosen_columns(board: Board, columns: Sequence[str]) -> str:
    """Return the overview with these columns only, in this order; costs are columns, too."""
    header, lines = overview_cells(board)
    costs = spent.labels(board.rows)
    header += costs.values()
    for row, line in zip(board.rows, lines, strict=True):
        found = spent.spent(row)
        line += [spent.shown(found.get(name)) for name in costs]
    unknown = [name for name in columns if name not in header]
    if unknown:
        there = ", ".join(without_empty_columns(header, lines)[0])
        raise KsclError(f"--columns: There is no column '{unknown[0]}'. There are {there}.")
    kept = [header.index(name) for name in columns]
    return table([header[i] for i in kept], [[line[i] for i in kept] for line in lines])


def summary_table(ranks: Sequence[MeanRank]) -> str:
    """Return the mean ranks of rows over protocols."""
    header = [*IDENTITY, "mean rank", "95 % interval", "protocols"]
    lines = []
    for it in ranks:
        ends = f"{it.interval[0]:.2f} to {it.interval[1]:.2f}" if it.interval else ""
        lines.append([*identity(it.row), f"{it.mean:.2f}", ends, str(it.protocols)])
    return table(*without_empty_columns(header, lines))


def cost_table(rows: Sequence[Row]) -> str:
    """Return what the stages of each row cost."""
    costs = spent.labels(rows)
    header = [*IDENTITY, *costs.values()]
    lines = []
    for row in rows:
        found = spent.spent(row)
        values = [spent.shown(found.get(name)) for name in costs]
        lines.append([*identity(row), *values])
    return table(*without_empty_columns(header, lines))


def _section_table(section: Section) -> str:
    labels = cells.metric_labels(section)
    head = ["rank", *IDENTITY, *labels, "95 % interval", "p (Holm)"]
    header = [*head, *(cells.FIGURE_LABELS[name] for name in FIGURES), *COUNTS, "mark"]
    lines = []
    for row in section.rows:
        result = row.results[section.protocol]
        headline = result.measures.get(section.protocol.headline)
        rank = headline.standing.rank if headline else None
        p = headline.standing.p if headline else None
        lines.append(
            [
                "" if rank is None else str(rank),
                *identity(row),
                *(
                    _value(result.measures.get(metric), section.about[metric].digits)
                    for metric in section.metrics
                ),
                _interval(headline),
                cells.p_value(p),
                *cells.figures(row),
                *(str(result.n_pretrain), str(result.n_finetune)),
                ", ".join(marks(row, section)),
            ]
        )
    return table(header, lines)


def _reported_table(section: Section) -> str:
    labels = cells.metric_labels(section)
    header = [*IDENTITY, *labels, "min/epoch", "n", "source", "note"]
    return table(header, [_reported_cells(row, section) for row in section.reported])


def _reported_cells(row: Reported, section: Section) -> list[str]:
    """Return the cells of a published row, with one digit after the point as it was published."""
    values = [
        number_and_spread(row.metrics[metric], row.std.get(metric), digits=1)
        if metric in row.metrics
        else ""
        for metric in section.metrics
    ]
    identity = [row.method, row.backbone, cells.plain(row.epochs), cells.plain(row.shots)]
    return [
        *map(text, [*identity, cells.percent(row.rho)]),
        *values,
        cells.plain(row.minutes_per_epoch),
        cells.plain(row.trials),
        text(row.source),
        text("; ".join(filter(None, (row.setting, row.note)))),
    ]


def marks(row: Row, section: Section) -> list[str]:
    """Return what a reader should know of a row's standing."""
    headline = _measure(row, section, section.protocol.headline)
    found: list[str] = []
    if headline:
        verdict = headline.standing.verdict
        one_seed = verdict == "not tested" and len(headline.values) == 1
        found.append("not tested: one pretraining seed" if one_seed else verdict)
    found += [text(words) for words in (*row.doubts, *row.results[section.protocol].warnings)]
    if row.stale:
        found.append("stale")
    return found


def text(words: str) -> str:
    """Escape text for Markdown: it starts no markup, no link, no HTML and no new cell."""
    words = "".join(c if unicodedata.category(c)[0] != "C" else " " for c in words)
    words = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(f"({SPECIAL})", r"\\\1", " ".join(words.split()))


def plain(document: str) -> str:
    """Return Markdown for a terminal: names unescaped, in columns of the same width."""
    return "\n".join(
        re.sub(CELL, lambda cell: _unescaped(cell[0]).ljust(len(cell[0])), line)
        if line.startswith("|")
        else _unescaped(line)
        for line in document.split("\n")
    )


def _unescaped(words: str) -> str:
    words = re.sub(rf"\\({SPECIAL})", r"\1", words)
    return words.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


def identity(row: Row) -> list[str]:
    """Return the escaped cells that say which entry a row is."""
    return [text(word) for word in cells.identity(row)]


def _measure(row: Row, section: Section, metric: str) -> Measure | None:
    result = row.results.get(section.protocol)
    return result.measures.get(metric) if result else None


def _value(measure: Measure | None, digits: int) -> str:
    if measure is None:
        return ""
    shown = number_and_spread(measure.mean, measure.std, digits)
    if measure.std_is == OVER_TRIALS:
        shown += "°"
    if measure.standing.verdict == "best":
        return f"**{shown}**"
    return f"{shown} ≈" if measure.standing.verdict == "not distinguishable" else shown


def _interval(measure: Measure | None) -> str:
    mark = " †" if measure and measure.interval_is == TEST_SAMPLING else ""
    return cells.interval(measure) + mark


def _summary(board: Board) -> str:
    records = "1 record" if board.records == 1 else f"{board.records:,} records"
    rows = "1 row" if len(board.rows) == 1 else f"{len(board.rows):,} rows"
    count = len(board.sections)
    protocols = "1 protocol" if count == 1 else f"{count} protocols"
    left_out = f"; {len(board.problems)} files not counted" if board.problems else ""
    return f"{rows} from {records} under {protocols}{left_out}."


def _column_key(sections: Sequence[Section]) -> str:
    letters = cells.section_letters(sections)
    lines = [
        f"- {', '.join(cells.metric_labels(section, letter))}: {text(name)}"
        for section, letter, name in zip(
            sections, letters, cells.section_names(sections), strict=True
        )
    ]
    return "\n".join(lines)


def without_empty_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], but: Sequence[str] = ()
) -> tuple[list[str], list[list[str]]]:
    """Leave out columns that are empty in every row, and those named in `but`."""
    kept = [i for i, name in enumerate(header) if name not in but and any(row[i] for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table that reads as a table on a terminal too."""
    sides = ["left" if name in TEXT_COLUMNS else "right" for name in header]
    return tabulate(rows, header, tablefmt="pipe", colalign=sides, disable_numparse=True)
