"""How a value is written in a table: the same digits everywhere, and nothing where nothing is."""

from __future__ import annotations

from collections.abc import Sequence

from kscl.benchmark.leaderboard.rows import FIGURES, METRICS, Measure, Row, Section

METRIC_LABELS = {
    ("linear", "top1"): "top-1",
    ("linear", "top5"): "top-5",
    ("knn", "top1"): "kNN",
    ("detection", "AP50"): "AP50",
    ("detection", "AP"): "AP",
    ("detection", "AP75"): "AP75",
}
FIGURE_LABELS = {
    "mean_rank": "mean rank kept",
    "minutes_per_epoch": "min/epoch",
    "views_per_second": "views/s",
}


def plain(value: float | None) -> str:
    """Epochs, K: as they are."""
    return "" if value is None else f"{value:g}"


def percent(rho: float | None) -> str:
    return "" if rho is None else f"{100 * rho:g}%"


def value(number: float, spread: float | None, digits: int = 2) -> str:
    shown = f"{number:.{digits}f}"
    return shown if spread is None else f"{shown} ± {spread:.{digits}f}"


def figure(name: str, number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:.0f}" if name == "views_per_second" else f"{number:.2f}"


def figures(row: Row) -> list[str]:
    return [figure(name, row.figures.get(name)) for name in FIGURES]


def identity(row: Row) -> list[str]:
    it = row.contender
    method = f"{it.method} ({row.tag})" if row.tag else it.method
    return [method, it.backbone, plain(it.epochs), plain(it.shots), percent(it.rho)]


def interval(measure: Measure | None) -> str:
    if measure is None or measure.interval is None:
        return ""
    low, high = measure.interval
    return f"{low:.2f} to {high:.2f}"


def p_value(p: float | None) -> str:
    if p is None:
        return ""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def section_names(sections: Sequence[Section]) -> list[str]:
    return [section_name(section) for section in sections]


def section_name(section: Section) -> str:
    return f"{section.protocol.id} · {section.protocol.hash}"


def section_letters(sections: Sequence[Section]) -> list[str]:
    """A letter for each protocol whose kind has several, so that every column has one protocol."""
    kinds = [section.protocol.kind for section in sections]
    letters = []
    for i, kind in enumerate(kinds):
        place = kinds[:i].count(kind)
        letters.append(_letters(place) if kinds.count(kind) > 1 else "")
    return letters


def metric_labels(section: Section, letter: str = "") -> list[str]:
    suffix = f" ({letter})" if letter else ""
    kind = section.protocol.kind
    return [METRIC_LABELS[kind, metric] + suffix for metric in METRICS[kind]]


def n_pretrain(row: Row) -> str:
    evaluated = [result.n_pretrain for result in row.results.values()]
    return _range(evaluated or [len({loaded.record["seed"] for loaded in row.pretrainings})])


def n_finetune(row: Row) -> str:
    return _range([result.n_finetune for result in row.results.values()])


def _range(numbers: Sequence[int]) -> str:
    """Over the protocols of a row: one number where they agree."""
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}–{high}"


def _letters(place: int) -> str:
    """a … z, aa, ab …"""
    word = ""
    place += 1
    while place:
        place, rest = divmod(place - 1, 26)
        word = chr(ord("a") + rest) + word
    return word
