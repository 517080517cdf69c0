"""The answer first: one sentence per task and contender, and what speaks against trusting it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from scipy.special import stdtrit

from kscl.benchmark.leaderboard.differences import (
    Difference,
    difference,
    named_rows,
    shortest_name,
)
from kscl.benchmark.leaderboard.entries import THE_FILE
from kscl.benchmark.leaderboard.labels_saved import with_all_labels
from kscl.benchmark.leaderboard.reading import RANDOM
from kscl.benchmark.leaderboard.rows import Board, Row, Section
from kscl.benchmark.leaderboard.statistics import LEVEL
from kscl.benchmark.leaderboard.tables import row_name, short_name

ONE_SEED = "One seed: seed-to-seed variation not measured."
ONE_FILE = "One file of weights: how another pretraining of its kind varies is not known."
IN_ONE_SENTENCE = 8  # rows; a longer list is a table, which follows anyway
ADVICE = (
    "For three seeds, run the suite again with --num-seeds 3; what is finished is kept. Without a "
    "suite, repeat pretraining and evaluation with SEED 1 and SEED 2."
)
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
    interval: tuple[float, float] | None  # 95%, over pretraining seeds, corrected (THE_TEST)
    p: float | None  # of the same test; the ranks come from it, too
    interval_over_images: tuple[float, float] | None  # 95%, of these backbones
    seeds: int  # the fewest that either row has
    sentence: str


def answers(board: Board, baselines: Sequence[str] = ()) -> list[Answer]:
    """Return an answer for every row and protocol; the baseline is random weights unless named.

    `labels_saved` answers for protocols with a part of another one's labels.
    """
    return [
        answer
        for section in with_all_labels(board)
        for answer in _of_section(section, baselines or (RANDOM,), board)
    ]


def scores(board: Board) -> list[str]:
    """Return all rows of each task in one line, best first: `kscl: 41.2 AP. Random weights: …`."""
    found = []
    for section in with_all_labels(board):
        rows, label = section.rows, section.headline_label
        if 2 < len(rows) <= IN_ONE_SENTENCE:  # two are in the sentence about their difference
            parts = [_score(row, section) for row in rows]
            parts[0] += f" {label}"
            found.append(f"{_task(section, board)}: {'. '.join(parts)}.")
    return found


def _score(row: Row, section: Section) -> str:
    name, longer = _name(row, section), row.entry.longer
    if longer > 1:
        name = row.entry.method if row.is_pretrained else "Random"
        name += f", trained {longer:.3g} times as long"
    low = " (too low to compare)" if section.result(row).too_low else ""
    return f"{name.replace('random', 'Random', 1)}: {section.headline(row).mean:.1f}{low}"


def warnings(board: Board) -> list[str]:
    """Return what makes numbers unusable or doubtful, one sentence each."""
    found = []
    for section in with_all_labels(board):  # few labels are meant to give low scores
        low = [row for row in section.rows if section.result(row).too_low]
        who = [f"{short_name(row, board.rows)}, whose {_lowest(row, section)}, is" for row in low]
        who = ["every row is"] if len(low) == len(section.rows) else who
        found += [
            f"{_task(section, board)}: {it} too low to compare. Train longer, or bring more "
            "annotated images; what is too low is not ranked, and never called best."
            for it in who
        ]
        for metric in section.about.values():
            values = [it.measures.get(metric.name) for it in section.results]
            best = max((it.mean for it in values if it), default=0.0)
            working = metric.working_from
            if working is not None and best < working and len(low) < len(section.rows):
                found.append(
                    f"{_task(section, board)}: the best {metric.label} is {best:.1f}. Below "
                    f"{working:g}, this compares starts of training, not working networks."
                )
    return found + [
        f"{short_name(row, board.rows)}: {said} No result of this row is called best."
        for row in board.rows
        for said in row.warnings
    ]


def advice(found: Sequence[Answer]) -> list[str]:
    """Return how to get more seeds, once for all answers that lack them."""
    return [ADVICE] if any(ONE_SEED in answer.sentence for answer in found) else []


def baselines_to_choose(board: Board, baselines: Sequence[str] = ()) -> list[str]:
    """Return how to name the baseline, in one line, where several rows have random weights."""
    if baselines:
        return []
    names: dict[str, None] = {}
    for section in board.sections:
        rows = named_rows(section.rows, RANDOM)
        if len(rows) > 1:
            names |= dict.fromkeys(shortest_name(row, section.rows) for row in rows)
    if not names:
        return []
    listed = " or ".join(f'--baseline "{it}"' for it in names)
    return [f"Several rows have random weights, so none is the baseline. Choose one: {listed}."]


def _of_section(section: Section, baselines: Sequence[str], board: Board) -> Iterator[Answer]:
    named = [named_rows(section.rows, baseline) for baseline in baselines]
    # A name may fit no row here, or several, which the comparison refuses by name.
    chosen = [rows[0] for rows in named if len(rows) == 1]
    order = sorted(chosen, key=lambda row: row.is_pretrained)
    for to in chosen:
        before = order[: order.index(to) + 1]  # of two baselines, the later one is compared
        for row in section.rows:
            if row not in before:
                yield _answer(section, row, to, board)


def _answer(section: Section, row: Row, to: Row, board: Board) -> Answer:
    label = section.headline_label
    one, other = (section.headline(it).values for it in (row, to))
    who, whom = _name(row, section), _name(to, section)
    found = difference(section, row, to)
    test, seeds = found.test, min(found.seeds)
    shows = test is not None and test.shows
    low = [r for r in (row, to) if section.result(r).too_low]
    gain = -found.mean if section.protocol.lower_is_better else found.mean
    better = row if gain > 0 else to
    if len(low) == 2:
        said = f"{who} and {whom} are too low to compare ({fmean(one):.1f} and {fmean(other):.1f} "
        said += f"{label})"
    elif low and not (shows and better not in low):
        said = f"{who} and {whom} cannot be compared ({fmean(one):.1f} and {fmean(other):.1f} "
        said += f"{label}): {_too_low(low[0], section)}"
    elif test is None:
        said = f"{who} {fmean(one):.1f} vs. {fmean(other):.1f} {label} with {whom} "
        said += f"({found.mean:+.1f}{_over_images(found)})"
    elif not shows:
        size = detectable(one, other, MORE_SEEDS, test.level)
        said = f"no difference shown between {who} and {whom} ({test.interval[0]:+.1f} to "
        said += f"{test.interval[1]:+.1f} {label}, {seeds} seeds); with {MORE_SEEDS} more seeds, "
        said += f"a difference of {size:.1f} would show in {POWER:.0%} of cases"
    else:
        ends = sorted(test.interval if found.mean > 0 else map(abs, test.interval))
        bounds = f"(95% interval {ends[0]:.1f} to {ends[1]:.1f}, {seeds} seeds)"
        said = _verdict(row.is_pretrained, who, found.mean, gain, label, whom) + f" {bounds}"
        said += f"; {_too_low(low[0], section)}" if low else ""
    doubted = [_name(r, section) for r in (row, to) if r.warnings]
    said += f"; {' and '.join(doubted)}: see the warnings" if doubted else ""
    sentence = f"{_task(section, board)}: {said}."
    if test is None and not low:
        single = [r for r in (row, to) if len(section.headline(r).values) == 1]
        sentence += f" {ONE_FILE if all(_is_one_file(r, section) for r in single) else ONE_SEED}"
    return Answer(
        protocol=section.name,
        metric=section.protocol.headline,
        row=row_name(row),
        baseline=row_name(to),
        difference=found.mean,
        interval=found.welch,
        p=test.p if test else None,
        interval_over_images=found.by_image,
        seeds=seeds,
        sentence=sentence,
    )


def _is_one_file(row: Row, section: Section) -> bool:
    """Return whether a row is a file without a seed, such as a download, in several trials."""
    is_file = section.headline(row).replicates == (THE_FILE,)
    return is_file and section.result(row).n_finetune > 1


def _over_images(found: Difference) -> str:
    if found.by_image is None:
        return "; 95% CI over test images not recorded"
    low, high = found.by_image
    return f"; 95% CI over test images {low:.1f} to {high:.1f}"


def _verdict(
    is_pretrained: bool, who: str, difference: float, gain: float, label: str, whom: str
) -> str:
    """Return a difference that was shown in words: only pretraining adds or costs something."""
    size = abs(difference)
    if not is_pretrained or gain != difference:
        order = "higher" if difference > 0 else "lower"
        return f"with {who} {label} is {size:.1f} {order} than with {whom}"
    if difference > 0:
        return f"{who} pretraining adds {size:.1f} {label} over {whom}"
    return f"{who} pretraining costs {size:.1f} {label} against {whom}"


def _lowest(row: Row, section: Section) -> str:
    low = section.result(row).too_low
    return f"lowest {low[0].label} {low[1]:.1f}" if low else ""


def _too_low(row: Row, section: Section) -> str:
    return f"the {_lowest(row, section)} of {_name(row, section)} is too low to compare"


def detectable(
    one: Sequence[float], other: Sequence[float], more: int, level: float = LEVEL
) -> float:
    """Return the difference that `more` seeds per row would show, with a chance of POWER."""
    count = min(len(one), len(other)) + more
    freedom = 2 * (count - 1)
    quantiles = stdtrit(freedom, (1 + level) / 2) + stdtrit(freedom, POWER)
    variance = (np.var(one, ddof=1) + np.var(other, ddof=1)) / count
    return float(quantiles * np.sqrt(variance))


def _task(section: Section, board: Board) -> str:
    kind = section.protocol.kind
    several = sum(other.protocol.kind == kind for other in board.sections) > 1
    title = section.protocol.title
    return f"{title} under {section.protocol.id}" if several else title


def _name(row: Row, section: Section) -> str:
    name = short_name(row, section.rows)
    return "random weights" if name == RANDOM else name
