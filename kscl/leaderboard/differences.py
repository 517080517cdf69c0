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
    """One table a protocol, for the metric that ranks its rows.

    The base is a method, or METHOD@EPOCHS where it was trained for several lengths.
    """
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


def _base(section: Section, metric: str, base: str) -> tuple[Row, Measure] | None:
    method, _, epochs = base.partition("@")
    found = [
        (row, row.results[section.protocol].measures[metric])
        for row in section.rows
        if row.contender.method == method
        and epochs in ("", cells.plain(row.contender.epochs))
        and metric in row.results[section.protocol].measures
    ]
    if len(found) > 1:
        rows = "; ".join(" ".join(filter(None, cells.identity(row))) for row, _ in found)
        raise KsclError(f"--against {base}: which of {rows}? METHOD@EPOCHS names one by its length")
    return found[0] if found else None


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
