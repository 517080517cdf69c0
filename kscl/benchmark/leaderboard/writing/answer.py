"""The answer first: one sentence per task and contender, and what speaks against trusting it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import numpy as np
from scipy.special import stdtrit

from kscl.benchmark.leaderboard.board import HEADLINE, Board, Row, Section
from kscl.benchmark.leaderboard.rows import too_low
from kscl.benchmark.leaderboard.statistics import welch_interval
from kscl.benchmark.leaderboard.writing import cells
from kscl.benchmark.leaderboard.writing.differences import named_rows

RANDOM = "random"
TASKS = {
    "linear": "Classifier (linear probe)",
    "knn": "Classifier (nearest neighbors)",
    "svm": "Classifier (SVMs)",
    "low_shot": "Classifier (SVMs on few images)",
    "linear_suite": "Classifier (many sets)",
    "finetune": "Classifier (fine-tuned on few labels)",
    "detection": "Detector",
}
MORE_SEEDS = 3
POWER = 0.8  # chance to detect a difference of the size that is told


@dataclass(frozen=True)
class Answer:
    """How one row differs from the baseline under one protocol, in numbers and in words."""

    protocol: str
    metric: str
    row: str
    baseline: str
    difference: float
    interval: tuple[float, float] | None  # 95 %, by Welch's t over pretraining seeds
    seeds: int  # the fewest that either row has
    sentence: str


def answers(board: Board, baselines: Sequence[str] = ()) -> list[Answer]:
    """Return an answer for every row and protocol; the baseline is random weights unless named."""
    return [
        answer
        for section, name in zip(board.sections, cells.section_names(board.sections), strict=True)
        for answer in _of_section(section, name, baselines or (RANDOM,), board)
    ]


def warnings(board: Board) -> list[str]:
    """Return what makes numbers unusable or doubtful, one sentence each."""
    found = []
    for section in board.sections:
        if too_low(section.protocol.kind, section.rows, section.protocol):
            found.append(
                f"{_task(section, board)}: every row is too low to compare. Train longer, or bring "
                "more annotated images; no row is called best."
            )
    for row in board.rows:
        name = cells.name(row)
        found += [f"{name}: {text} No result of this row is called best." for text in row.doubts]
    return found


def as_dicts(found: Sequence[Answer]) -> list[dict[str, object]]:
    """Return the answers for JSON."""
    return [asdict(answer) for answer in found]


def _of_section(
    section: Section, name: str, baselines: Sequence[str], board: Board
) -> Iterator[Answer]:
    metric = HEADLINE[section.protocol.kind]
    having = [row for row in section.rows if metric in row.results[section.protocol].measures]
    for baseline in baselines:
        rows = named_rows(having, baseline)
        if len(rows) != 1:  # none here, or several, which the comparison refuses by name
            continue
        for row in having:
            if row is not rows[0] and row.entry.method not in baselines:
                yield _answer(section, name, row, rows[0], board)


def _answer(section: Section, name: str, row: Row, to: Row, board: Board) -> Answer:
    metric = HEADLINE[section.protocol.kind]
    label = cells.METRIC_LABELS[section.protocol.kind, metric]
    one, other = (r.results[section.protocol].measures[metric].values for r in (row, to))
    who, whom = _name(row, section), _name(to, section)
    difference = fmean(one) - fmean(other)
    interval = welch_interval(one, other)
    seeds = min(len(one), len(other))
    task = _task(section, board)
    if too_low(section.protocol.kind, section.rows, section.protocol):
        said = f"{who} and {whom} are too low to compare ({fmean(one):.1f} and {fmean(other):.1f} "
        said += f"{label})"
    elif interval is None:
        said = f"with one seed no difference can be told from noise ({who} {fmean(one):.1f}, "
        said += f"{whom} {fmean(other):.1f} {label}); run three seeds: write "
        said += "seeds: [0, 1, 2] in the file of the suite and run it again"
    elif interval[0] <= 0 <= interval[1]:
        said = f"no difference shown between {who} and {whom} ({interval[0]:+.1f} to "
        said += f"{interval[1]:+.1f} {label}, {seeds} seeds); {MORE_SEEDS} more seeds would detect "
        said += f"a difference of {detectable(one, other, MORE_SEEDS):.1f}"
    else:
        verb = "adds" if difference > 0 else "costs"
        said = f"{who} pretraining {verb} {difference:+.1f} {label} over {whom} (95 % interval "
        said += f"{interval[0]:.1f} to {interval[1]:.1f}, {seeds} seeds)"
    sentence = f"{task}: {said}."
    names = cells.name(row), cells.name(to)
    return Answer(name, metric, *names, difference, interval, seeds, sentence)


def detectable(one: Sequence[float], other: Sequence[float], more: int) -> float:
    """Return the difference that `more` seeds per row would show, with a chance of POWER."""
    count = min(len(one), len(other)) + more
    freedom = 2 * (count - 1)
    quantiles = stdtrit(freedom, 0.975) + stdtrit(freedom, POWER)
    variance = (np.var(one, ddof=1) + np.var(other, ddof=1)) / count
    return float(quantiles * np.sqrt(variance))


def _task(section: Section, board: Board) -> str:
    kind = section.protocol.kind
    several = sum(other.protocol.kind == kind for other in board.sections) > 1
    return f"{TASKS[kind]} under {section.protocol.id}" if several else TASKS[kind]


def _name(row: Row, section: Section) -> str:
    """Return the method, or all that tells it from another row of the same method."""
    alike = [other for other in section.rows if other.entry.method == row.entry.method]
    if row.entry.method == RANDOM and len(alike) == 1:
        return "random weights"
    if len(alike) == 1:
        return row.entry.method
    return cells.name(row)
