"""How many labels a pretraining saves: scores against the number of labeled images.

Sections that differ only in the fraction of the labels form a group. A curve runs through a row's
scores, straight between two of them over the logarithm of the number of labeled images.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kscl.benchmark.leaderboard.differences import named_rows
from kscl.benchmark.leaderboard.reading import RANDOM, number
from kscl.benchmark.leaderboard.rows import OVER_SEEDS, Board, Measure, Row, Section
from kscl.benchmark.leaderboard.statistics import welch_interval
from kscl.benchmark.leaderboard.tables import (
    IDENTITY,
    identity,
    row_name,
    short_name,
    table,
    text,
    without_empty_columns,
)
from kscl.data.labeled import FRACTION_IN_PROTOCOL
from kscl.records.spread import number_and_spread

FIGURE = "labels_saved.png"
STEPS = 200  # numbers of labels that are tested, evenly in their logarithm
EXPLANATION = (
    "Labels saved: the smallest number of labeled images from which on a row's mean score stays at "
    "or above the baseline's with all labels (x in the chart), on straight lines over the log of "
    "the number of images. Its 95% interval (the wide bar) has every number at which Welch's t "
    "test, with pretraining seeds as the units and draws averaged first, shows no difference from "
    "that score. Training is equally long with few and many labels unless the protocol says "
    "otherwise."
)

Group = dict[float, Section]  # fraction of the labels → section, rising up to 1
Curve = dict[int, Measure]  # number of labeled images → score, rising
Ends = tuple[float | None, ...]  # two, of an interval; None: more than all labels


@dataclass(frozen=True)
class Saved:
    """The part of the labels with which a row reaches the baseline's score with all of them."""

    protocol: str
    metric: str
    row: str
    baseline: str
    target: float
    labels: float | None  # images; None if it does not reach it
    fraction: float | None
    interval: Ends | None  # of the fraction; None without several seeds
    seeds: int
    sentence: str


def groups(board: Board) -> list[Group]:
    """Return the protocols that were measured with all labels and with a part of them."""
    found: dict[str, Group] = {}
    for section in board.sections:
        if _labels(section):
            definition = dict(section.definition)
            fraction = float(definition.pop(FRACTION_IN_PROTOCOL, 1))
            protocol = section.protocol
            same = [protocol.kind, protocol.headline, protocol.lower_is_better, definition]
            found.setdefault(json.dumps(same, sort_keys=True), {})[fraction] = section
    return [dict(sorted(of.items())) for of in found.values() if len(of) > 1 and 1.0 in of]


def with_all_labels(board: Board) -> list[Section]:
    """Return the sections without those that have a part of the labels of another one."""
    parts = {id(section) for group in groups(board) for section in list(group.values())[:-1]}
    return [section for section in board.sections if id(section) not in parts]


def _labels(section: Section) -> int:
    """Return the number of labeled images: the draws of a fraction have equally many."""
    files = (file for result in section.results for file in result.records)
    return max((int(number(file.record.details.get("n_train")) or 0) for file in files), default=0)


def _curve(group: Group, row: Row) -> Curve:
    having = [section for section in group.values() if section.protocol in row.results]
    return {_labels(section): section.headline(row) for section in having}


# Where a curve reaches a target


def reached(labels: Sequence[int], scores: Sequence[float], target: float) -> float | None:
    """Return the number of labels from which on a curve stays at or above a target.

    The smallest number if it is never below, None if it ends below.
    """
    below = [i for i, score in enumerate(scores) if score < target]
    if not below:
        return float(labels[0])
    if below[-1] == len(labels) - 1:
        return None
    (low, high), logs = scores[below[-1] :][:2], np.log(labels[below[-1] :][:2])
    return float(np.exp(logs[0] + (target - low) / (high - low) * (logs[1] - logs[0])))


def interval(labels: Sequence[int], curves: np.ndarray, targets: Sequence[float]) -> Ends | None:
    """Return the interval of the number of labels at which curves (S, P) reach the targets (T,).

    Below it, Welch's interval of curves − targets is below 0, above it, above 0. None without
    several curves and several targets.
    """
    if min(len(curves), len(targets)) < 2:
        return None
    numbers = np.geomspace(labels[0], labels[-1], STEPS)
    values = [np.interp(np.log(numbers), np.log(labels), curve) for curve in curves]
    tests = np.array([welch_interval(at, targets) for at in np.transpose(values)])  # (STEPS, 2)
    may_reach, may_miss = tests[:, 1] >= 0, tests[:, 0] < 0
    low = max(int(may_reach.argmax()) - 1, 0) if may_reach.any() else STEPS
    high = STEPS - int(may_miss[::-1].argmax()) if may_miss.any() else 0
    return tuple(float(numbers[end]) if end < STEPS else None for end in (low, high))


def labels_saved(board: Board, baselines: Sequence[str] = ()) -> list[Saved]:
    """Return for every row and protocol how many labels reach the baseline's full-data score.

    A score that is too low to compare is no target; the warnings name it.
    """
    found = groups(board)
    kinds = [group[1.0].protocol.kind for group in found]
    answers = []
    for group in found:
        full = group[1.0]
        several = kinds.count(full.protocol.kind) > 1
        title = full.protocol.title + (f" under {full.protocol.id}" if several else "")
        for name in baselines or (RANDOM,):
            named = named_rows(full.rows, name)
            if len(named) == 1 and not named[0].results[full.protocol].too_low:
                answers += [
                    _saved(group, row, named[0], title)
                    for row in full.rows
                    if row is not named[0]
                    and (row.is_pretrained or not named[0].is_pretrained)
                    and len(_curve(group, row)) > 1
                ]
    return answers


def _saved(group: Group, row: Row, to: Row, title: str) -> Saved:
    section, curve, goal = group[1.0], _curve(group, row), group[1.0].headline(to)
    sign = -1.0 if section.protocol.lower_is_better else 1.0
    labels, measures = list(curve), list(curve.values())
    full = labels[-1]
    found = reached(labels, [sign * it.mean for it in measures], sign * goal.mean)
    by_seed = [it.by_seed for it in measures]
    seeds = [seed for seed in by_seed[-1] if all(seed in values for values in by_seed)]
    curves = sign * np.array([[values[seed] for values in by_seed] for seed in seeds])
    ends = interval(labels, curves, [sign * value for value in goal.values])
    part = None if ends is None else tuple(end and end / full for end in ends)
    label = section.headline_label
    said = f"{title}: {short_name(row, section.rows)} "
    target = f"{short_name(to, section.rows)}'s full-data {label} ({goal.mean:.1f})"
    if found is None:
        said += f"does not reach {target}: {measures[-1].mean:.1f} with all {full:,} labels"
    else:
        share = _share(found / full, labels[0] / full)
        said += f"reaches {target} with {share} of the labels"
    return Saved(
        protocol=section.protocol.id,
        metric=section.protocol.headline,
        row=row_name(row),
        baseline=row_name(to),
        target=goal.mean,
        labels=found,
        fraction=None if found is None else found / full,
        interval=part,
        seeds=min(len(seeds), len(goal.values)),
        sentence=f"{said} ({_interval_words(part, labels[0] / full)}).",
    )


def _interval_words(ends: Ends | None, smallest: float) -> str:
    if ends is None:
        return "95% CI not measured: it takes several seeds of both"
    low, high = (_share(end, smallest) for end in ends)
    return f"95% CI {low} to {high}" if low != high else f"95% CI {low}"


def _share(fraction: float | None, smallest: float) -> str:
    """Return a part of the labels as text; less than the smallest was not measured."""
    if fraction is None:
        return "more than 100%"
    percent = f"{100 * fraction:.2g}%" if fraction < 0.995 else "100%"
    return f"{percent} or less" if fraction == smallest else percent


# What is shown


def labels_tables(board: Board) -> list[str]:
    """Return a Markdown table for each protocol: a column per number of labeled images."""
    found = []
    for group in groups(board):
        full = group[1.0]
        numbers = sorted({_labels(section) for section in group.values()})
        lines = []
        for row in full.rows:
            cells = [_curve(group, row).get(it) for it in numbers]
            shown = [number_and_spread(it.mean, it.std) if it else "" for it in cells]
            lines.append([*identity(row), *shown])
        label = full.headline_label
        said = f"{text(full.protocol.id)}: {label} by number of labeled images:"
        header = [*IDENTITY, *(f"{it:,}" for it in numbers)]
        found += [said, table(*without_empty_columns(header, lines))]
    return [*found, EXPLANATION] if found else []


def draw_labels(board: Board, saved: Sequence[Saved]) -> bytes:
    """Return a PNG with a panel per protocol: score against labeled images, with intervals."""
    from matplotlib.figure import Figure  # slow to import

    found = groups(board)
    canvas = Figure(figsize=(6 * len(found), 3.4), layout="constrained")
    for panel, group in zip(canvas.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        _draw_group(panel, group, [it for it in saved if it.protocol == group[1.0].protocol.id])
    written = io.BytesIO()
    canvas.savefig(written, dpi=140, format="png", metadata={"Software": None})
    return written.getvalue()


def _draw_group(panel: Any, group: Group, saved: Sequence[Saved]) -> None:
    full, colors = group[1.0], {}
    ticks = [_labels(section) for section in group.values()]
    for place, row in enumerate(sorted(full.rows, key=lambda row: row.entry.order)):
        colors[row_name(row)] = color = f"C{place}"
        curve = _curve(group, row)
        means = [measure.mean for measure in curve.values()]
        panel.plot([*curve], means, marker="o", color=color, label=short_name(row, full.rows))
        for labels, measure in curve.items():
            if measure.interval and measure.interval_is == OVER_SEEDS:
                beside = labels * (ticks[-1] / ticks[0]) ** (0.006 * place)
                panel.vlines(beside, *measure.interval, color=color, alpha=0.6)
    for it in saved:
        panel.axhline(it.target, color=colors[it.baseline], linestyle=":", linewidth=1)
        if it.interval:  # where the row reaches the target
            ends = [ticks[-1] * (1 if end is None else end) for end in it.interval]
            panel.plot(ends, [it.target] * 2, color=colors[it.row], linewidth=6, alpha=0.25)
        if it.labels:
            panel.plot(it.labels, it.target, marker="x", markersize=9, color=colors[it.row])
    panel.set_xscale("log")
    panel.set_xticks(ticks, [f"{it:,}" for it in ticks])
    panel.minorticks_off()
    panel.set_xlabel("labeled images")
    panel.set_ylabel(full.headline_label)
    panel.set_title(full.protocol.id, fontsize=8, color="0.4")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8, loc="lower right")  # curves rise
