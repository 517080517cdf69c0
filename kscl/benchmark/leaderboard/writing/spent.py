"""What the stages of a row cost: time and peak memory, as far as its records say."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from kscl.benchmark.leaderboard.board import Row
from kscl.benchmark.leaderboard.details import inside, number
from kscl.benchmark.leaderboard.reading import RecordFile

# Cost → its label and unit; `minutes` is in every record, the others where the machine tells.
COSTS = {"minutes": "min", "memory": "GiB", "gpu_memory": "GPU GiB"}
RECORDED = {
    "memory": "peak_memory_gib",
    "gpu_memory": "peak_gpu_memory_gib",
}
EXPLANATION = (
    "Minutes are means over the runs of a stage, peak memory is the highest of them: GiB of the "
    "main process, and of one GPU. What was not recorded is empty. Costs of different machines are "
    "not comparable."
)


def spent(row: Row) -> dict[str, float]:
    """Return `STAGE_COST` → its mean over the runs of the stage (a peak: the highest)."""
    found: dict[str, float] = {}
    for stage in _stages([row]):
        files = [file for file in row.records if file.record.task.stage == stage]
        for cost in COSTS:
            values = _values(files, cost)
            if values:
                found[f"{stage}_{cost}"] = max(values) if "memory" in cost else fmean(values)
    return found


def labels(rows: Sequence[Row]) -> dict[str, str]:
    """Return the column name of every cost: `pretrain_minutes` is `pretrain min`."""
    return {
        f"{stage}_{cost}": f"{stage} {unit}"
        for stage in _stages(rows)
        for cost, unit in COSTS.items()
    }


def shown(value: float | None) -> str:
    """Return a cost with the digits it deserves."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _stages(rows: Sequence[Row]) -> list[str]:
    """Return the stages of all records, pretraining first."""
    records = [file.record for row in rows for file in row.records]
    found = sorted({(r.kind != "pretrain", r.task.title, r.task.stage) for r in records})
    return list(dict.fromkeys(stage for _, _, stage in found))


def _values(files: Sequence[RecordFile], cost: str) -> list[float]:
    if cost == "minutes":
        return [file.record.seconds / 60 for file in files]
    given = [number(inside(file.record.details, "costs", RECORDED[cost])) for file in files]
    return [value for value in given if value is not None]
