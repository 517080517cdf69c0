"""The cost of each pretraining, beside the paper's times and a plain count of forward passes."""

from __future__ import annotations

from statistics import fmean

from fvcore.common.config import CfgNode

from kscl.benchmark.leaderboard.board import Board, Row
from kscl.benchmark.leaderboard.details import inside, mapping, number
from kscl.benchmark.leaderboard.reported import MINUTES_OF_PAPER
from kscl.benchmark.leaderboard.writing.tables import (
    IDENTITY,
    identity,
    table,
    without_empty_columns,
)
from kscl.methods.cost import PASSES_OF_MOCO, forward_passes
from kscl.records.spread import mean_and_std
from kscl.views.sizes import check_sizes

EXPLANATION = (
    "Costs of pretraining, mean ± standard deviation over the runs, measured while other stages "
    "may have run on the same machine. Ratios are to K = 1: the measured one to the fastest row "
    "with K = 1, the paper's to its 16 minutes, the counted one in forward passes of the encoder, "
    "where a backward pass costs two. Rank: the mean number of directions kept of the K, per run."
)


def costs(board: Board) -> str:
    """Return the table of costs; empty if nothing was pretrained here."""
    timed = [row for row in board.rows if _minutes(row)]
    if not timed:
        return ""
    units = [fmean(_minutes(row)) for row in timed if row.entry.shots == 1]
    unit = min(units) if units else None
    header = [*IDENTITY, "min/epoch", "ratio", "paper", "counted", "min/run", "rank kept"]
    lines = [[*identity(row), *_cost(row, unit)] for row in timed]
    return "\n\n".join([table(*without_empty_columns(header, lines)), EXPLANATION])


def _cost(row: Row, unit: float | None) -> list[str]:
    minutes, it = _minutes(row), row.entry
    paper = MINUTES_OF_PAPER.get((it.shots, it.rho)) if it.method == "kscl" else None
    passes = _passes(row)
    ranks = [file.record.metrics.get("mean_rank") for file in row.pretrainings]
    return [
        mean_and_std(minutes),
        f"{fmean(minutes) / unit:.2f}" if unit else "",
        f"{paper / MINUTES_OF_PAPER[1, None]:.2f}" if paper else "",
        f"{passes / PASSES_OF_MOCO:.2f}" if passes else "",
        f"{fmean(file.record.seconds for file in row.pretrainings) / 60:.1f}",
        ", ".join(f"{rank:.2f}" for rank in ranks if rank is not None),
    ]


def _passes(row: Row) -> float | None:
    """Count forward passes; None for a record of another release, whose settings are not known."""
    values = row.pretrainings[0].record.config.values
    # An older release had one query, and no small ones.
    method = {"NUM_QUERIES": 1, **mapping(inside(values, "METHOD"))}
    small = {"COUNT": 0, "SIZE": 0, **mapping(inside(values, "VIEWS", "SMALL"))}
    flags = {key: method.get(key) for key in ("GRAD_THROUGH_KEYS", "SYMMETRIC")}
    numbers = {key: number(method.get(key)) for key in ("NUM_SHOTS", "NUM_QUERIES")}
    crops = {key: number(small.get(key)) for key in ("COUNT", "SIZE")}
    size, epochs = inside(values, "INPUT", "SIZE"), number(inside(values, "SOLVER", "EPOCHS"))
    flagged = all(isinstance(flag, bool) for flag in flags.values())
    if epochs is None or None in (*numbers.values(), *crops.values()) or not flagged:
        return None
    if not epochs >= 1 or check_sizes(size, int(epochs)):
        return None
    cfg = {"METHOD": {**numbers, **flags}, "VIEWS": {"SMALL": crops}, "INPUT": {"SIZE": size}}
    cfg["SOLVER"] = {"EPOCHS": int(epochs)}
    return forward_passes(CfgNode(cfg))


def _minutes(row: Row) -> list[float]:
    found = [file.record.metrics.get("minutes_per_epoch") for file in row.pretrainings]
    return [minutes for minutes in found if minutes is not None]
