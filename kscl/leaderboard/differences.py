"""Every row against one row that a reader names: by how much it differs, and how sure that is."""

from __future__ import annotations

from statistics import fmean

from kscl.errors import KsclError
from kscl.leaderboard import cells
from kscl.leaderboard.rows import HEADLINE, Board, Measure, Row, Section
from kscl.leaderboard.statistics import t_interval, welch_interval
from kscl.leaderboard.tables import IDENTITY, identity, table

EXPLANATION = (
    "Difference of the means; 95 % intervals by Welch's t with pretraining seeds as the units, and "
    "paired by seed: equal seeds saw the same images in the same order and were tested on the same "
    "images. An interval that holds 0 is within noise. No correction for several comparisons."
)


def differences(board: Board, base: str) -> str:
    """One table a protocol, for the metric that ranks its rows."""
    parts = []
    for section in board.sections:
        metric = HEADLINE[section.protocol.kind]
        to = _base(section, metric, base)
        if to is None:
            continue
        label = cells.METRIC_LABELS[section.protocol.kind, metric]
        header = [*IDENTITY, f"{label} − {base}'s", "Welch", "paired by seed", "seeds"]
        lines = []
        for row in section.rows:
            measure = row.results[section.protocol].measures.get(metric)
            if measure is not None and row is not to[0]:
                lines.append([*identity(row), *_difference(measure, to[1])])
        parts += [f"Under {cells.section_name(section)}:", table(header, lines)]
    if not parts:
        methods = sorted({row.contender.method for row in board.rows})
        raise KsclError(f"--against {base}: no such method; there are {', '.join(methods)}")
    return "\n\n".join([*parts, EXPLANATION])


def _base(section: Section, metric: str, method: str) -> tuple[Row, Measure] | None:
    """Of several rows of this method (longer trainings, for one) the one with most seeds."""
    found = [
        (row, row.results[section.protocol].measures[metric])
        for row in section.rows
        if row.contender.method == method and metric in row.results[section.protocol].measures
    ]
    return max(found, key=lambda item: len(item[1].values), default=None)


def _difference(one: Measure, other: Measure) -> list[str]:
    ours = dict(zip(one.replicates, one.values, strict=True))
    theirs = dict(zip(other.replicates, other.values, strict=True))
    shared = [seed for seed in ours if seed in theirs]
    paired = t_interval([ours[seed] - theirs[seed] for seed in shared]) if shared else None
    return [
        f"{fmean(one.values) - fmean(other.values):+.2f}",
        _interval(welch_interval(one.values, other.values)),
        _interval(paired),
        f"{len(one.values)} and {len(other.values)}",
    ]


def _interval(bounds: tuple[float, float] | None) -> str:
    return "one seed: none" if bounds is None else f"{bounds[0]:+.2f} to {bounds[1]:+.2f}"
