"""A board inside a document: between two marks, so that no number there is typed by hand.

<!-- board demo -->
…
<!-- end of board demo -->
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from kscl.benchmark.leaderboard.board import Board
from kscl.benchmark.leaderboard.details import machine
from kscl.benchmark.leaderboard.writing import cells
from kscl.benchmark.leaderboard.writing.costs import costs
from kscl.benchmark.leaderboard.writing.differences import EXPLANATION as WHAT_INTERVALS
from kscl.benchmark.leaderboard.writing.tables import (
    IDENTITY,
    LEGEND,
    SHORT_LEGEND,
    chosen_columns,
    identity,
    overview_cells,
    table,
    text,
    without_empty_columns,
)
from kscl.errors import KsclError
from kscl.records.record import Record
from kscl.records.spread import number_and_spread
from kscl.runtime.files import write_atomically
from kscl.runtime.logs import clock

BY_ALL_SCORERS = ("AP50", "AP", "AP75")


def insert(path: Path, name: str, content: str) -> None:
    """Replace what is between the marks of this name."""
    start, end = f"<!-- board {name} -->", f"<!-- end of board {name} -->"
    try:
        whole = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise KsclError(f"--insert {path}: The document cannot be read: {reason}.") from error
    if whole.count(start) != 1 or whole.count(end) != 1 or whole.index(start) > whole.index(end):
        raise KsclError(
            f"--insert {path}: It must contain, once and in this order, {start} and {end}."
        )
    pattern = re.escape(start) + ".*?" + re.escape(end)
    block = f"{start}\n{content.strip()}\n{end}"
    replaced = re.sub(pattern, lambda _: block, whole, flags=re.DOTALL)
    write_atomically(path, replaced.encode("utf-8", "replace"))


def document(board: Board, compared: Mapping[str, str], columns: Sequence[str] = ()) -> str:
    """Return the board as part of a text; the comparisons by baseline are folded away.

    With columns, return a table of them and nothing else but a legend and its origin.
    """
    if columns:
        return "\n\n".join([chosen_columns(board, columns), f"{SHORT_LEGEND}.", origin(board)])
    cost = costs(board) if compared else ""
    told_there = [*cells.FIGURE_LABELS.values()] if cost else []
    shown = table(*without_empty_columns(*overview_cells(board), but=told_there))
    parts = [shown, LEGEND]
    if compared:
        parts += [all_scorers(board), cost]
        title = text(f"Differences to {', '.join(compared)}, with intervals")
        folded = [*compared.values(), WHAT_INTERVALS, "</details>"]
        parts.append("\n\n".join([f"<details><summary>{title}</summary>", *folded]))
    return "\n\n".join(filter(None, [*parts, origin(board)]))


def all_scorers(board: Board) -> str:
    """Return the same detections under the protocol's own scorer and under the others."""
    parts = []
    for section in board.sections:
        results = [row.results[section.protocol] for row in section.rows]
        names = {name for result in results for name in result.measures}
        others = sorted({name.partition("/")[0] for name in names if "/" in name} - {"mask"})
        if not others:
            continue
        own = str(results[0].records[0].record.details.get("scorer", "its own"))
        columns = {text(f"{own} {metric}"): metric for metric in BY_ALL_SCORERS}
        for other in others:
            named = {text(f"{other} {metric}"): metric for metric in BY_ALL_SCORERS}
            columns |= {label: f"{other}/{metric}" for label, metric in named.items()}
        lines = []
        for row, result in zip(section.rows, results, strict=True):
            found = [result.measures.get(name) for name in columns.values()]
            values = [number_and_spread(it.mean, it.std) if it else "" for it in found]
            lines.append([*identity(row), *values])
        shown = table(*without_empty_columns([*IDENTITY, *columns], lines))
        parts.append(f"By all scorers, under {text(cells.section_name(section))}:\n\n{shown}")
    return "\n\n".join(parts)


def origin(board: Board) -> str:
    """Say where the numbers come from: seeds, code, machine and time, as recorded."""
    records = [file.record for row in board.rows for file in row.records]
    commits = sorted({_commit(record) for record in records})
    machines = sorted({text(machine(record)) for record in records})
    seeds = map(str, sorted({record.seed for record in records}))
    by_kind: dict[str, float] = {}
    for record in records:
        by_kind[record.kind] = by_kind.get(record.kind, 0.0) + record.seconds
    times = ", ".join(f"{kind} {clock(seconds)}" for kind, seconds in by_kind.items())
    running = running_time(_span(record) for record in records)
    return (
        f"From {len(records)} records; seeds {', '.join(seeds)}; code {', '.join(commits)}; "
        f"{', '.join(machines)}. Running time {clock(running)}; summed over the stages, some of "
        f"which ran in parallel: {times}."
    )


def running_time(spans: Iterable[tuple[float, float]]) -> float:
    """Return how long any of these (start, end) ran: without pauses, and overlaps counted once.

    A record knows how long its run took, not when it was interrupted: a resumed run counts as if it
    had run in one piece, so the time is then at most this.
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _span(record: Record) -> tuple[float, float]:
    end = datetime.fromisoformat(record.created).timestamp()
    return end - record.seconds, end


def _commit(record: Record) -> str:
    named = text((record.code.commit or record.code.version)[:9])
    return f"{named} with changes" if record.code.dirty else named
