"""What each pretraining cost: beside a row that a reader names, the paper, and plain counting."""

from __future__ import annotations

from kscl.config import relative_step_cost
from kscl.leaderboard import cells
from kscl.leaderboard.details import inside, number
from kscl.leaderboard.differences import named_rows
from kscl.leaderboard.reported import PAPER_MINUTES
from kscl.leaderboard.rows import Board, Row
from kscl.leaderboard.statistics import std
from kscl.leaderboard.tables import IDENTITY, identity, table, without_empty_columns

EXPLANATION = (
    "Time per epoch, mean ± standard deviation over the runs, as a multiple of the named row's. "
    "The paper: 16 : 26 : 37 minutes for K = 1, 3, 5. Counted: a step is 3 + K forward passes. "
    "Rank: how many directions of the K are kept on average, in each run."
)


def costs(board: Board, base: str) -> str:
    """Empty where the named row was not pretrained here, or no row was."""
    bases = [row for row in named_rows(board.rows, base) if _minutes(row)]
    if not bases:
        return ""
    unit = _mean(_minutes(bases[0]))
    header = [*IDENTITY, "min/epoch", f"÷ {base}'s", "paper", "counted", "min in all", "rank kept"]
    lines = [[*identity(row), *_cost(row, unit)] for row in board.rows if _minutes(row)]
    return "\n\n".join([table(*without_empty_columns(header, lines)), EXPLANATION])


def _cost(row: Row, unit: float) -> list[str]:
    minutes = _minutes(row)
    it = row.contender
    paper = PAPER_MINUTES.get((it.shots, it.rho)) if it.method in ("kscl", "moco_v2") else None
    values = row.pretrainings[0].record["config"]["values"]
    by_query_alone = it.shots and not inside(values, "METHOD", "GRAD_THROUGH_KEYS")
    ranks = [number(run.record["metrics"].get("mean_rank")) for run in row.pretrainings]
    return [
        cells.value(_mean(minutes), std(minutes)),
        f"{_mean(minutes) / unit:.2f}",
        f"{paper / PAPER_MINUTES[1, None]:.2f}" if paper else "",
        f"{relative_step_cost(it.shots):.2f}" if it.shots and by_query_alone else "",
        f"{_mean([run.record['seconds'] / 60 for run in row.pretrainings]):.1f}",
        ", ".join("" if rank is None else f"{rank:.2f}" for rank in ranks),
    ]


def _minutes(row: Row) -> list[float]:
    found = [number(run.record["metrics"].get("minutes_per_epoch")) for run in row.pretrainings]
    return [minutes for minutes in found if minutes is not None]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
