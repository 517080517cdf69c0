"""What each pretraining cost, beside the paper's times and a plain count of forward passes."""

from __future__ import annotations

from statistics import fmean

from fvcore.common.config import CfgNode

from kscl.benchmark.leaderboard import cells
from kscl.benchmark.leaderboard.details import inside, number
from kscl.benchmark.leaderboard.reported import MINUTES_OF_PAPER
from kscl.benchmark.leaderboard.rows import Board, Row
from kscl.benchmark.leaderboard.statistics import std
from kscl.benchmark.leaderboard.tables import IDENTITY, identity, table, without_empty_columns
from kscl.method.cost import PASSES_OF_MOCO, forward_passes

EXPLANATION = (
    "Of pretraining, mean ± standard deviation over the runs, as fast as they were beside other "
    "stages. Ratios are to K = 1: the measured one to the row of K = 1 that takes least, the "
    "paper's to its 16 minutes, the counted one in forward passes of the encoder, of which a "
    "backward pass costs two. Rank: how many of the K directions are kept on average, in each run."
)


def costs(board: Board) -> str:
    """Empty where nothing was pretrained here."""
    timed = [row for row in board.rows if _minutes(row)]
    if not timed:
        return ""
    units = [fmean(_minutes(row)) for row in timed if row.contender.shots == 1]
    unit = min(units) if units else None
    header = [*IDENTITY, "min/epoch", "ratio", "paper", "counted", "min/run", "rank kept"]
    lines = [[*identity(row), *_cost(row, unit)] for row in timed]
    return "\n\n".join([table(*without_empty_columns(header, lines)), EXPLANATION])


def _cost(row: Row, unit: float | None) -> list[str]:
    minutes, it = _minutes(row), row.contender
    paper = MINUTES_OF_PAPER.get((it.shots, it.rho)) if it.method == "kscl" else None
    passes = _passes(row)
    ranks = [number(run.record["metrics"].get("mean_rank")) for run in row.pretrainings]
    return [
        cells.value(fmean(minutes), std(minutes)),
        f"{fmean(minutes) / unit:.2f}" if unit else "",
        f"{paper / MINUTES_OF_PAPER[1, None]:.2f}" if paper else "",
        f"{passes / PASSES_OF_MOCO:.2f}" if passes else "",
        f"{fmean(run.record['seconds'] for run in row.pretrainings) / 60:.1f}",
        ", ".join(f"{rank:.2f}" for rank in ranks if rank is not None),
    ]


def _passes(row: Row) -> int | None:
    """None where the record is of another release, whose settings we do not know."""
    method = inside(row.pretrainings[0].record, "config", "values", "METHOD")
    needed = ("NUM_SHOTS", "GRAD_THROUGH_KEYS", "SYMMETRIC")
    if not isinstance(method, dict) or any(key not in method for key in needed):
        return None
    return forward_passes(CfgNode({"METHOD": method}))


def _minutes(row: Row) -> list[float]:
    found = [number(run.record["metrics"].get("minutes_per_epoch")) for run in row.pretrainings]
    return [minutes for minutes in found if minutes is not None]
