"""How a value is written in a table: the same digits everywhere, and empty if it is missing."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kscl.benchmark.leaderboard.board import FIGURES, Measure, Row, Section
from kscl.config import leaves

FIGURE_LABELS = {
    "mean_rank": "mean rank kept",
    "minutes_per_epoch": "min/epoch",
    "views_per_second": "views/s",
}
MAX_DIFFERENCES = 3  # settings that tell two protocols of one id apart
CLAUSE_END = r"[.:;,](?=\s|$)| \("
MAX_NAME = 80  # characters; one longer name would widen its column in every row


def plain(value: float | None) -> str:
    """Return a count such as epochs or K without digits it does not need."""
    return "" if value is None else f"{value:g}"


def percent(rho: float | None) -> str:
    """Return a fraction as a percentage."""
    return "" if rho is None else f"{100 * rho:g}%"


def figure(name: str, number: float | None) -> str:
    """Return a figure of a pretraining with the digits that its name deserves."""
    if number is None:
        return ""
    return f"{number:.0f}" if name == "views_per_second" else f"{number:.2f}"


def figures(row: Row) -> list[str]:
    """Return every figure of a row."""
    return [figure(name, row.figures.get(name)) for name in FIGURES]


def identity(row: Row) -> list[str]:
    """Return method, backbone, epochs, K and ρ of a row."""
    it = row.entry
    method = f"{it.method} ({row.tag})" if row.tag else it.method
    return [_cut(method), _cut(backbone(row)), plain(it.epochs), plain(it.shots), percent(it.rho)]


def name(row: Row) -> str:
    """Return a row in words: its method, and in parentheses all that tells it from others."""
    it = row.entry
    settings = (
        _cut(backbone(row)),
        f"K {it.shots}" if it.shots is not None else "",
        f"ρ {percent(it.rho)}" if it.rho is not None else "",
        f"{it.epochs:g} epochs" if it.epochs is not None else "",
        _cut(row.tag),
    )
    told = ", ".join(filter(None, settings))
    return f"{_cut(it.method)} ({told})" if told else _cut(it.method)


def warning(row: Row) -> str:
    """Return the first clause of a row's first warning, and how many more there are."""
    told = [*row.doubts, *(word for result in row.results.values() for word in result.warnings)]
    first, *more = dict.fromkeys(re.split(CLAUSE_END, word)[0] for word in told) or [""]
    return f"{_cut(first)} (and {len(more)} more)" if more else _cut(first)


def backbone(row: Row) -> str:
    """Return the network; one of another width than its name says with its channels and size."""
    it, count = row.entry, row.parameters
    if not it.width:
        return it.backbone
    size = f", {count / 1e6:.1f} M parameters" if count else ""
    return f"{it.backbone} ({it.width}{size})"


def interval(measure: Measure | None) -> str:
    """Return the interval of a measure, if it has one."""
    if measure is None or measure.interval is None:
        return ""
    low, high = measure.interval
    return f"{low:.2f} to {high:.2f}"


def p_value(p: float | None) -> str:
    """Return a p value, small ones as a bound."""
    if p is None:
        return ""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def section_names(sections: Sequence[Section]) -> list[str]:
    """Return the name of each section; what tells it from others of its id is added."""
    return [
        " · ".join(filter(None, (section_name(section), _what_differs(section, sections))))
        for section in sections
    ]


def section_name(section: Section) -> str:
    """Return the protocol of a section as it is shown: its id and its hash."""
    return f"{_cut(section.protocol.id)} · {section.protocol.hash}"


def _what_differs(section: Section, sections: Sequence[Section]) -> str:
    """Return the settings that protocols of the same id do not share, as `KNN.K 20`."""
    mine, key = _settings(section), (section.protocol.kind, section.protocol.id)
    others = [
        _settings(other)
        for other in sections
        if other is not section and (other.protocol.kind, other.protocol.id) == key
    ]
    found = [
        f"{name} {value}"
        for name, value in mine.items()
        if any(other.get(name) != value for other in others)
    ]
    return _cut(", ".join(found[:MAX_DIFFERENCES]))


def _settings(section: Section) -> dict[str, str]:
    """Return the definition of a protocol by full key, without the fingerprints of its data."""
    definition = section.definition if isinstance(section.definition, dict) else {}
    own = {key: value for key, value in definition.items() if key != "data"}
    return {key: str(value) for key, value in leaves(own)}


def section_letters(sections: Sequence[Section]) -> list[str]:
    """Return a letter for each protocol whose kind has several, to tell their columns apart."""
    kinds = [section.protocol.kind for section in sections]
    letters = []
    for i, kind in enumerate(kinds):
        index = kinds[:i].count(kind)
        letters.append(_letters(index) if kinds.count(kind) > 1 else "")
    return letters


def metric_labels(section: Section, letter: str = "") -> list[str]:
    """Return the column names of a section's metrics."""
    suffix = f" ({letter})" if letter else ""
    return [_cut(section.label(metric)) + suffix for metric in section.metrics]


def n_pretrain(row: Row) -> str:
    """Return the number of pretraining seeds, over the protocols of a row."""
    evaluated = [result.n_pretrain for result in row.results.values()]
    return _range(evaluated or [len({file.record.seed for file in row.pretrainings})])


def n_finetune(row: Row) -> str:
    """Return the number of evaluation trials, over the protocols of a row."""
    return _range([result.n_finetune for result in row.results.values()])


def _range(numbers: Sequence[int]) -> str:
    """Return one number where all are equal, and the lowest and highest otherwise."""
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}–{high}"


def _letters(index: int) -> str:
    """Return a, b, … z, aa, ab and so on."""
    word = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        word = chr(ord("a") + rest) + word
    return word


def _cut(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"
