"""The board as Markdown: one table over all protocols, then each protocol ranked separately.

Values have the same digits everywhere, and a missing one leaves its cell empty. A board can stand
in a document between two marks, so that no number there is typed by hand:

<!-- board demo -->
…
<!-- end of board demo -->
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean

from fvcore.common.config import CfgNode
from tabulate import tabulate

from kscl.benchmark.leaderboard.columns import (
    COLUMNS,
    WHAT_COSTS_ARE,
    cost_cells,
    cost_labels,
    shown,
)
from kscl.benchmark.leaderboard.reading import machine
from kscl.benchmark.leaderboard.reported import MINUTES_OF_PAPER, Reported
from kscl.benchmark.leaderboard.rows import (
    OVER_TRIALS,
    TEST_SAMPLING,
    WHAT_MEAN_RANKS_ARE,
    Board,
    MeanRank,
    Row,
    Section,
    cut,
)
from kscl.benchmark.leaderboard.statistics import THE_TEST
from kscl.engine.cost import PASSES_OF_MOCO, forward_passes
from kscl.errors import KsclError
from kscl.records.record import Record
from kscl.records.spread import mean_and_std, number_and_spread
from kscl.runtime.files import write_atomically
from kscl.runtime.logs import clock

IDENTITY = ["method", "backbone", "epochs", "K", "ρ"]
COUNTS = ["n_pretrain", "n_finetune"]
TEXT_COLUMNS = (
    *("method", "backbone", "mark", "note", "source", "95% interval"),
    *("row", "class", "cost"),
)
SPECIAL = r"[\\`*_{}\[\]|~#!]"  # starts markup in Markdown unless a backslash is before it
CLAUSE_END = r"[.:;,](?=\s|$)| \("

SHORT_LEGEND = (
    "Mean ± standard deviation over pretraining seeds. **Bold**: the best row of the column's "
    "protocol that was tested; ≈: not distinguishable from it"
)
LEGEND = (
    f"{SHORT_LEGEND}; °: over trials on one backbone; "
    "†: 95% interval of a single trial, test sampling only."
)
WHAT_PRETRAINING_COSTS = (
    "Costs of pretraining, mean ± standard deviation over the runs, measured while other stages "
    "may have run on the same machine. Ratios are to K = 1: the measured one to the fastest row "
    "with K = 1, the paper's to its 16 minutes, the counted one in forward passes of the encoder, "
    "where a backward pass costs two. Rank: the mean number of directions kept of the K, per run."
)


# Words and cells


def text(words: str) -> str:
    """Escape text for Markdown: it starts no markup, no link, no HTML and no new cell."""
    words = "".join(c if unicodedata.category(c)[0] != "C" else " " for c in words)
    words = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(f"({SPECIAL})", r"\\\1", " ".join(words.split()))


def short(value: float | None) -> str:
    """Return a count such as epochs or K without digits it does not need."""
    return "" if value is None else f"{value:g}"


def percent(rho: float | None) -> str:
    """Return a fraction as a percentage."""
    return "" if rho is None else f"{100 * rho:g}%"


def backbone(row: Row) -> str:
    """Return the network; one of another width than its name says with its channels and size."""
    it, count = row.entry, row.parameters
    if not it.width:
        return it.backbone
    size = f", {count / 1e6:.1f} M parameters" if count else ""
    return f"{it.backbone} ({it.width}{size})"


def row_name(row: Row) -> str:
    """Return a row in words: its method, and in parentheses all of its settings."""
    return _named(row, _settings(row))


def short_name(row: Row, rows: Sequence[Row]) -> str:
    """Return the method, and what tells it from other rows of the same method among these."""
    alike = [_settings(other) for other in rows if other.entry.method == row.entry.method]
    columns = zip(_settings(row), zip(*alike, strict=True), strict=True)
    return _named(row, (word for word, all_ in columns if {word} != {*all_}))


def _settings(row: Row) -> list[str]:
    it = row.entry
    return [
        cut(backbone(row)),
        f"K {it.shots}" if it.shots is not None else "",
        f"ρ {percent(it.rho)}" if it.rho is not None else "",
        f"{it.epochs:g} epochs" if it.epochs is not None else "",
        cut(row.tag),
    ]


def _named(row: Row, settings: Iterable[str]) -> str:
    said = ", ".join(filter(None, settings))
    return f"{cut(row.entry.method)} ({said})" if said else cut(row.entry.method)


def identity(row: Row) -> list[str]:
    """Return the escaped cells that say which entry a row is."""
    it = row.entry
    method = f"{it.method} ({row.tag})" if row.tag else it.method
    numbers = [short(it.epochs), short(it.shots), percent(it.rho)]
    return [text(cut(method)), text(cut(backbone(row))), *numbers]


def interval(ends: tuple[float, float] | None, form: str = ".2f") -> str:
    """Return both ends of an interval; empty if there is none."""
    return "" if ends is None else f"{ends[0]:{form}} to {ends[1]:{form}}"


def counts(row: Row) -> list[str]:
    """Return the numbers of pretraining seeds and of trials: over protocols, lowest and highest."""
    results = row.results.values()
    seeds = {it.n_pretrain for it in results} or {len({f.record.seed for f in row.pretrainings})}
    return [
        "–".join(map(str, sorted({min(numbers), max(numbers)}))) if numbers else ""
        for numbers in (seeds, {it.n_finetune for it in results})
    ]


def metric_labels(section: Section, with_letter: bool = False) -> list[str]:
    """Return the column names of a section's metrics."""
    suffix = f" ({section.letter})" if with_letter and section.letter else ""
    return [cut(section.label(metric)) + suffix for metric in section.metrics]


def _values(row: Row, section: Section) -> list[str]:
    """Return the cells of a section's metrics, marked by their standing."""
    result = row.results.get(section.protocol)
    cells = []
    for metric in section.metrics:
        measure = result.measures.get(metric) if result else None
        if measure is None:
            cells.append("")
            continue
        value = number_and_spread(measure.mean, measure.std, section.about[metric].digits)
        value += "°" if measure.std_is == OVER_TRIALS else ""
        marks = {"best": f"**{value}**", "not distinguishable": f"{value} ≈"}
        cells.append(marks.get(measure.standing.verdict, value))
    return cells


def _figures(row: Row) -> list[str]:
    return [text(it.cell(row)) for it in COLUMNS.values()]


def marks(row: Row, section: Section) -> list[str]:
    """Return what a reader should know of a row's standing."""
    headline = section.headline(row)
    verdict: str = headline.standing.verdict
    if verdict == "not tested" and len(headline.values) == 1:
        verdict = "not tested: one pretraining seed"
    said = (*row.warnings, *section.result(row).warnings)
    return [verdict, *map(text, said), *(["stale"] if row.stale else [])]


def _first_warning(row: Row) -> str:
    """Return the first clause of a row's first warning, and how many more there are."""
    said = [*row.warnings, *(word for result in row.results.values() for word in result.warnings)]
    first, *more = dict.fromkeys(re.split(CLAUSE_END, word)[0] for word in said) or [""]
    return f"{cut(first)} (and {len(more)} more)" if more else cut(first)


# Tables


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table that reads as a table on a terminal too."""
    sides = ["left" if name in TEXT_COLUMNS else "right" for name in header]
    return tabulate(rows, header, tablefmt="pipe", colalign=sides, disable_numparse=True)


def without_empty_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], but: Sequence[str] = ()
) -> tuple[list[str], list[list[str]]]:
    """Leave out columns that are empty in every row, and those named in `but`."""
    kept = [i for i, name in enumerate(header) if name not in but and any(row[i] for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def compact(header: Sequence[str], rows: Sequence[Sequence[str]], but: Sequence[str] = ()) -> str:
    """Return a table without empty columns; settings that all rows share are said below it."""
    header, rows = without_empty_columns(header, rows, but)
    movable = {*IDENTITY[1:], *COUNTS, *(it.label for it in COLUMNS.values())}
    shared = {
        name: rows[0][i]
        for i, name in enumerate(header)
        if len(rows) > 1 and name in movable and len({row[i] for row in rows}) == 1
    }
    said = ", ".join(f"{name} {value}" for name, value in shared.items())
    drawn = table(*without_empty_columns(header, rows, tuple(shared)))
    return f"{drawn}\n\nAll rows: {said}." if shared else drawn


def markdown(board: Board, title: str, first: Sequence[str] = (), last: Sequence[str] = ()) -> str:
    """Return the whole board in Markdown, with parts before and after the tables."""
    overview = compact(*overview_cells(board))
    parts = [f"# {text(title)}", *first, _summary(board), "## Overview", overview, LEGEND]
    columns = [
        f"- {', '.join(metric_labels(section, with_letter=True))}: {text(section.name)}"
        for section in board.sections
    ]
    parts += ["\n".join(columns)] if columns else []
    for section in board.sections:
        parts += [f"## {text(section.name)}", _section_table(section)]
        if section.reported:
            parts += [
                "Reported elsewhere (published figures: not ranked, not tested):",
                _reported_table(section),
            ]
    if board.mean_ranks:
        parts += ["## Summary over protocols", _summary_table(board.mean_ranks)]
        parts.append(text(WHAT_MEAN_RANKS_ARE))
    if board.rows:
        parts += ["## Costs", cost_table(board.rows), text(WHAT_COSTS_ARE)]
    parts += [*last, "## The test", text(THE_TEST)]
    stale = [f"- {text(row_name(row))}: {text(why)}" for row in board.rows for why in row.stale]
    problems = [f"- {text(problem)}" for problem in board.problems]
    parts += ["## Stale rows", "\n".join(stale)] if stale else []
    parts += ["## Files that were not counted", "\n".join(problems)] if problems else []
    return "\n\n".join(parts) + "\n"


def overview_cells(board: Board) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: one row per entry; every metric column has exactly one protocol."""
    metrics = [label for section in board.sections for label in metric_labels(section, True)]
    lines = []
    for row in board.rows:
        values = [cell for section in board.sections for cell in _values(row, section)]
        mark = ", ".join(filter(None, [text(_first_warning(row)), "stale" * bool(row.stale)]))
        method, *settings = identity(row)
        lines.append([method, *values, *settings, *_figures(row), *counts(row), mark])
    labels = [it.label for it in COLUMNS.values()]
    return ["method", *metrics, *IDENTITY[1:], *labels, *COUNTS, "mark"], lines


def chosen_columns(board: Board, columns: Sequence[str]) -> str:
    """Return the overview with these columns only, in this order; costs are columns, too."""
    header, lines = overview_cells(board)
    costs = cost_labels(board.rows)
    header += costs.values()
    for row, line in zip(board.rows, lines, strict=True):
        line += cost_cells(row, list(costs))
    unknown = [it for it in columns if it not in header]
    if unknown:
        there = ", ".join(without_empty_columns(header, lines)[0])
        raise KsclError(f"--columns: There is no column '{unknown[0]}'. There are {there}.")
    kept = [header.index(it) for it in columns]
    return table([header[i] for i in kept], [[line[i] for i in kept] for line in lines])


def cost_table(rows: Sequence[Row]) -> str:
    """Return what the stages of each row cost."""
    costs = cost_labels(rows)
    lines = [[*identity(row), *cost_cells(row, list(costs))] for row in rows]
    return compact([*IDENTITY, *costs.values()], lines)


def _summary(board: Board) -> str:
    numbers = {"row": len(board.rows), "record": board.records, "protocol": len(board.sections)}
    rows, records, protocols = (
        f"{number:,} {what}{'s' * (number != 1)}" for what, number in numbers.items()
    )
    left_out = f"; {len(board.problems)} files not counted" if board.problems else ""
    return f"{rows} from {records} under {protocols}{left_out}."


def _summary_table(ranks: Sequence[MeanRank]) -> str:
    lines = [
        [*identity(it.row), f"{it.mean_rank:.2f}", interval(it.interval), str(it.protocols)]
        for it in ranks
    ]
    return compact([*IDENTITY, "mean rank", "95% interval", "protocols"], lines)


def _section_table(section: Section) -> str:
    headline_label, *labels = metric_labels(section)
    head = ["method", headline_label, "95% interval", "p (Holm)", "rank", *labels, *IDENTITY[1:]]
    header = [*head, *(it.label for it in COLUMNS.values()), *COUNTS, "mark"]
    digits = section.about[section.protocol.headline].digits
    lines = []
    for row in section.rows:
        result, headline = section.result(row), section.headline(row)
        rank, p = headline.standing.rank, headline.standing.p
        sampled = " †" if headline.interval_is == TEST_SAMPLING else ""
        (method, *settings), (value, *values) = identity(row), _values(row, section)
        lines.append(
            [
                *(method, value),
                interval(headline.interval, f".{digits}f") + sampled,
                "< 0.001" if p is not None and p < 0.001 else shown(p, 3),
                "" if rank is None else str(rank),
                *(*values, *settings),
                *_figures(row),
                *(str(result.n_pretrain), str(result.n_finetune)),
                ", ".join(marks(row, section)),
            ]
        )
    return compact(header, lines)


def _reported_table(section: Section) -> str:
    """Return published rows, with one digit after the point as they were published."""

    def cells(row: Reported) -> list[str]:
        values = [
            number_and_spread(row.metrics[metric], row.std.get(metric), digits=1)
            if metric in row.metrics
            else ""
            for metric in section.metrics
        ]
        numbers = [short(row.epochs), short(row.shots), percent(row.rho)]
        about = "; ".join(filter(None, (row.setting, row.note)))
        costs = [short(row.minutes_per_epoch), short(row.trials)]
        settings = [text(row.backbone), *numbers, *costs, text(row.source), text(about)]
        return [text(row.method), *values, *settings]

    header = ["method", *metric_labels(section), *IDENTITY[1:], "min/epoch", "n", "source", "note"]
    return compact(header, [cells(row) for row in section.reported])


# A board inside a document


def insert(path: Path, mark: str, content: str) -> None:
    """Replace what is between the marks of this name."""
    start, end = f"<!-- board {mark} -->", f"<!-- end of board {mark} -->"
    try:
        whole = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise KsclError(f"--insert {path}: The document cannot be read: {reason}.") from error
    if whole.count(start) != 1 or whole.count(end) != 1 or whole.index(start) > whole.index(end):
        raise KsclError(
            f"--insert {path}: It must contain, once and in this order, {start} and {end}."
        )
    before, _, rest = whole.partition(start)
    after = rest.partition(end)[2]
    replaced = f"{before}{start}\n{content.strip()}\n{end}{after}"
    write_atomically(path, replaced.encode("utf-8", "replace"))


def document(
    board: Board, compared: Mapping[str, str], columns: Sequence[str] = (), explained: str = ""
) -> str:
    """Return the board as part of a text; the comparisons by baseline are folded away.

    With columns, return a table of them and nothing else but a legend and its origin.
    """
    if columns:
        return "\n\n".join([chosen_columns(board, columns), f"{SHORT_LEGEND}.", origin(board)])
    cost = pretraining_costs(board) if compared else ""
    said_there = [it.label for it in COLUMNS.values()] if cost else []
    parts = [compact(*overview_cells(board), but=said_there), LEGEND]
    if compared:
        title = text(f"Differences to {', '.join(compared)}, with intervals")
        folded = [f"<details><summary>{title}</summary>", *compared.values(), explained]
        parts += [all_scorers(board), cost, *folded, "</details>"]
    return "\n\n".join(filter(None, [*parts, origin(board)]))


def all_scorers(board: Board) -> str:
    """Return the same detections under the protocol's own scorer and under the others."""
    parts = []
    for section in board.sections:
        further = [metric.rpartition("/") for metric in section.further_metrics]
        others = dict.fromkeys(of for of, _, _ in further if of and f"{of}/AP" not in section.about)
        if not others:
            continue
        own = str(section.results[0].records[0].record.details.get("scorer", "its own"))
        shared = [
            metric
            for metric in section.metrics
            if any((other, "/", metric) in further for other in others)
        ]
        columns = {text(f"{own} {metric}"): metric for metric in shared}
        for other in others:
            columns |= {text(f"{other} {metric}"): f"{other}/{metric}" for metric in shared}
        lines = []
        for row in section.rows:
            measures = section.result(row).measures
            found = [measures.get(metric) for metric in columns.values()]
            cells = [number_and_spread(it.mean, it.std) if it else "" for it in found]
            lines.append([*identity(row), *cells])
        drawn = compact([*IDENTITY, *columns], lines)
        parts.append(f"By all scorers, under {text(section.name)}:\n\n{drawn}")
    return "\n\n".join(parts)


def pretraining_costs(board: Board) -> str:
    """Return the costs of pretraining beside the paper's times and a count of forward passes.

    Empty if nothing was pretrained here.
    """
    timed = [row for row in board.rows if row.figure("minutes_per_epoch") is not None]
    if not timed:
        return ""
    units = [row.figure("minutes_per_epoch") for row in timed if row.entry.shots == 1]
    unit = min((it for it in units if it), default=None)
    header = [*IDENTITY, "min/epoch", "ratio", "paper", "counted", "min/run", "rank kept"]
    lines = [[*identity(row), *_pretraining_cost(row, unit)] for row in timed]
    return f"{compact(header, lines)}\n\n{WHAT_PRETRAINING_COSTS}"


def _pretraining_cost(row: Row, unit: float | None) -> list[str]:
    records, it = [file.record for file in row.pretrainings], row.entry
    minutes = [r.metrics["minutes_per_epoch"] for r in records if "minutes_per_epoch" in r.metrics]
    paper = MINUTES_OF_PAPER.get((it.shots, it.rho)) if it.method == "kscl" else None
    try:
        passes = forward_passes(CfgNode(records[0].config.values))
    except (KsclError, AttributeError, KeyError, TypeError, ValueError, ArithmeticError):
        passes = 0.0  # the settings of another release, or of a method that is not imported
    ranks = [record.metrics.get("mean_rank") for record in records]
    return [
        mean_and_std(minutes),
        f"{fmean(minutes) / unit:.2f}" if unit else "",
        f"{paper / MINUTES_OF_PAPER[1, None]:.2f}" if paper else "",
        f"{passes / PASSES_OF_MOCO:.2f}" if passes else "",
        f"{fmean(record.seconds for record in records) / 60:.1f}",
        ", ".join(f"{rank:.2f}" for rank in ranks if rank is not None),
    ]


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
    ends = [datetime.fromisoformat(record.created).timestamp() for record in records]
    running = running_time(
        (end - record.seconds, end) for record, end in zip(records, ends, strict=True)
    )
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


def _commit(record: Record) -> str:
    named = text((record.code.commit or record.code.version)[:9])
    return f"{named} with changes" if record.code.dirty else named
