"""Rows side by side: differences with intervals, classes, settings that differ, and costs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean

from kscl.benchmark.leaderboard.board import Board, Result, Row, Section
from kscl.benchmark.leaderboard.details import per_class
from kscl.benchmark.leaderboard.linking import SAME_FOR_ALL_SEEDS
from kscl.benchmark.leaderboard.writing import cells
from kscl.benchmark.leaderboard.writing.differences import (
    EXPLANATION,
    INTERVALS,
    Difference,
    difference,
    difference_cells,
    named_rows,
)
from kscl.benchmark.leaderboard.writing.tables import cost_table, table, without_empty_columns
from kscl.benchmark.leaderboard.writing.tables import text as escaped
from kscl.config import leaves_without, one_line
from kscl.errors import KsclError
from kscl.records.record import Json

PAIRED_ROWS = 40  # of a protocol, the best, whose differences the page can show
DIGITS = 4
NOT_RECORDED = "not recorded"  # what the interval over test images needs
NO_PRETRAINING = "no pretraining record"


def comparison(board: Board, names: Sequence[str]) -> str:
    """Return the rows of these names in Markdown, each compared with the first."""
    first, *others = rows = _rows(board, names)
    parts = [f"# {' against '.join([*map(_name, others), _name(first)])}"]
    together = [s for s in board.sections if sum(s.protocol in row.results for row in rows) > 1]
    for section in together:
        parts += [f"## {escaped(cells.section_name(section))}", *_section(section, rows)]
    if together:
        parts.append(EXPLANATION)
    else:
        parts.append("No two of these rows were measured under the same protocol.")
    parts += ["## Settings that differ", _settings(rows), "## Costs", cost_table(rows)]
    return "\n\n".join(parts) + "\n"


def pairs(section: Section) -> list[Json]:
    """Return the difference of every two of the section's best rows, by their index in it."""
    metric = section.protocol.headline
    rows = section.rows[:PAIRED_ROWS]
    indices = [i for i, row in enumerate(rows) if metric in row.results[section.protocol].measures]
    return [
        {"one": i, "other": j, **_plain(difference(section, rows[i], rows[j]))}
        for i, j in itertools.combinations(indices, 2)
    ]


def class_means(result: Result, metric: str) -> dict[str, float]:
    """Return class name → mean over the records that have a value for it."""
    classes: dict[str, list[float]] = {}
    for file in result.records:
        for name, value in per_class(file.record, metric).items():
            classes.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in classes.items()}


def _plain(found: Difference) -> Json:
    def rounded(bounds: tuple[float, float] | None) -> list[float] | None:
        return None if bounds is None else [round(end, DIGITS) for end in bounds]

    return {
        "mean": round(found.mean, DIGITS),
        "welch": rounded(found.welch),
        "by_seed": rounded(found.by_seed),
        "by_image": rounded(found.by_image),
        "shared": found.shared,
    }


def _rows(board: Board, names: Sequence[str]) -> list[Row]:
    if len(names) < 2:
        raise KsclError("--compare: Name two or more rows.")
    found: list[Row] = []
    for name in names:
        rows = named_rows(board.rows, name)
        if len(rows) != 1:
            known = rows or board.rows
            listed = "; ".join(f"{_name(row)} is {row.entry.key}" for row in known[:20])
            reason = "It fits several rows" if rows else "There is no such row"
            raise KsclError(
                f"--compare {name}: {reason}. Name a row as in kscl@2,K=5,40%, or by its key: "
                f"{listed}."
            )
        if rows[0] in found:
            raise KsclError(f"--compare {name}: The row is named twice.")
        found += rows
    return found


def _name(row: Row) -> str:
    return escaped(cells.name(row))


def _section(section: Section, rows: Sequence[Row]) -> list[str]:
    metric = section.protocol.headline
    having = {
        _name(row): row
        for row in rows
        if section.protocol in row.results and metric in row.results[section.protocol].measures
    }
    if len(having) < 2:
        return []
    results = {name: row.results[section.protocol] for name, row in having.items()}
    first, *others = results
    label = section.label(metric)
    header = ["row", label, f"{label} − reference", *INTERVALS]
    lines = [[first, f"{results[first].measures[metric].mean:.2f}", "reference", *[""] * 4]]
    for name in others:
        found = difference(section, having[name], having[first])
        mean = f"{results[name].measures[metric].mean:.2f}"
        lines.append([name, mean, *(word or NOT_RECORDED for word in difference_cells(found))])
    return [table(*without_empty_columns(header, lines)), *_classes(results, metric, label)]


def _classes(results: dict[str, Result], metric: str, label: str) -> list[str]:
    """Return a table of classes, where the rows differ most first."""
    values = {name: class_means(result, metric) for name, result in results.items()}
    known = {name: found for name, found in values.items() if found}
    if len(known) < 2:
        return []
    first, *others = known
    names = [name for name in known[first] if any(name in known[other] for other in others)]

    def spread(name: str) -> float:
        found = [known[row][name] for row in known if name in known[row]]
        return max(found) - min(found)

    lines = [
        [escaped(name), *(f"{known[row][name]:.2f}" if name in known[row] else "" for row in known)]
        for name in sorted(names, key=spread, reverse=True)
    ]
    return [
        f"{label} of each class, those that differ most first:",
        table(["class", *known], lines),
    ]


def _settings(rows: Sequence[Row]) -> str:
    values = {_name(row): _config(row) for row in rows}
    configs = [config for config in values.values() if config is not None]
    keys = sorted({key for config in configs for key in config})
    lines = []
    for key in keys:
        shown = [
            NO_PRETRAINING if config is None else one_line(config[key]) if key in config else "–"
            for config in values.values()
        ]
        if len({word for word in shown if word != NO_PRETRAINING}) > 1:
            lines.append([escaped(key), *map(escaped, shown)])
    without = [name for name, config in values.items() if config is None]
    said = [f"{name}: {NO_PRETRAINING}, so its settings are not known." for name in without]
    if lines:
        said.insert(0, table(["setting", *values], lines))
    elif len(configs) > 1:
        said.insert(0, "None that can change a result.")
    return "\n\n".join(said)


def _config(row: Row) -> dict[str, object] | None:
    if not row.pretrainings:
        return None
    return leaves_without(row.pretrainings[0].record.config.values, SAME_FOR_ALL_SEEDS)
