"""Columns about a row beside its metrics: each is one function, here or in a module of your own.

    @column("gpus", label="GPUs", digits=0, hint="Processes that shared a batch")
    def gpus(row):
        return row.pretrainings[0].record.details.get("processes") if row.pretrainings else None

It is then in the tables, the CSV, the JSON and on the page; see docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import methodcaller
from statistics import fmean

from kscl.benchmark.leaderboard.reading import image_count, inside, number
from kscl.benchmark.leaderboard.rows import Row
from kscl.registry import Registry

Value = float | str | None  # None leaves the cell empty


@dataclass(frozen=True)
class Column:
    """How a value of a row is found, and how it is shown."""

    name: str  # in CSV and JSON
    label: str  # in tables and on the page
    value: Callable[[Row], Value]
    digits: int
    hint: str
    lowest_first: bool  # when the page sorts by it

    def cell(self, row: Row) -> str:
        """Return the value as text."""
        value = self.value(row)
        return value if isinstance(value, str) else shown(value, self.digits)


COLUMNS: Registry[Column] = Registry("column")


def column(
    name: str, *, label: str = "", digits: int = 2, hint: str = "", lowest_first: bool = False
) -> Callable[[Callable[[Row], Value]], Callable[[Row], Value]]:
    """Register a function that returns the value of a row."""

    def register(value: Callable[[Row], Value]) -> Callable[[Row], Value]:
        COLUMNS.register(name, Column(name, label or name, value, digits, hint, lowest_first))
        return value

    return register


column("mean_rank", label="mean rank kept", hint="Mean number of basis vectors kept per image")(
    methodcaller("figure", "mean_rank")
)
column(
    "minutes_per_epoch",
    label="min/epoch",
    hint="Minutes of pretraining per pass over the images",
    lowest_first=True,
)(methodcaller("figure", "minutes_per_epoch"))
column(
    "views_per_second",
    label="views/s",
    digits=0,
    hint="Augmented views through the encoders per second, small ones included",
)(methodcaller("figure", "views_per_second"))


@column(
    "rankme",
    label="RankMe",
    digits=1,
    hint="Effective rank of the features of a probe's val images, at most the smaller of images "
    "and dimensions: compare it on the same images",
)
def rankme(row: Row) -> Value:
    """Return the mean over the probes; where they had several val sets, one mean for each."""
    found: dict[tuple[int, str], list[float]] = {}
    for record in (file.record for file in row.records):
        value = number(record.details.get("rankme"))
        if value is not None:
            images = (image_count(record) or 0, str(inside(record.data, "val", "hash")))
            found.setdefault(images, []).append(value)
    means = {images: fmean(values) for images, values in sorted(found.items())}
    if len(means) == 1:
        return next(iter(means.values()))
    shown_each = (f"{mean:.1f} ({count:,} images)" for (count, _), mean in means.items())
    return ", ".join(shown_each) or None


def figures(row: Row) -> dict[str, float | str]:
    """Return the values of all columns that a row has."""
    values = {name: it.value(row) for name, it in COLUMNS.items()}
    return {name: value for name, value in values.items() if value is not None}


def shown(value: float | None, digits: int) -> str:
    """Return a number with so many digits after the point; empty if there is none."""
    return "" if value is None else f"{value:.{digits}f}"


# What the stages of a row cost: time and peak memory, as far as its records say. `minutes` is in
# every record, the others where the machine tells.

COSTS = {"minutes": "min", "memory": "GiB", "gpu_memory": "GPU GiB"}
WHAT_COSTS_ARE = (
    "Minutes are means over the runs of a stage, peak memory is the highest of them: GiB of the "
    "main process, and of one GPU. What was not recorded is empty. Costs of different machines are "
    "not comparable."
)


def costs(row: Row) -> dict[str, float]:
    """Return `STAGE_COST` → its mean over the runs of the stage (a peak: the highest)."""
    found: dict[str, float] = {}
    for stage in _stages([row]):
        records = [file.record for file in row.records if file.record.task.stage == stage]
        found[f"{stage}_minutes"] = fmean(record.seconds / 60 for record in records)
        for peak in ("memory", "gpu_memory"):
            given = (number(inside(it.details, "costs", f"peak_{peak}_gib")) for it in records)
            if values := [value for value in given if value is not None]:
                found[f"{stage}_{peak}"] = max(values)
    return found


def cost_labels(rows: Sequence[Row]) -> dict[str, str]:
    """Return the column name of every cost: `pretrain_minutes` is `pretrain min`."""
    return {
        f"{stage}_{cost}": f"{stage} {unit}"
        for stage in _stages(rows)
        for cost, unit in COSTS.items()
    }


def cost_cells(row: Row, names: Sequence[str]) -> list[str]:
    """Return costs with the digits they deserve."""
    found = costs(row)
    values = [found.get(name) for name in names]
    return [shown(it, 0 if it and it >= 100 else 1 if it and it >= 10 else 2) for it in values]


def _stages(rows: Sequence[Row]) -> list[str]:
    """Return the stages of all records, pretraining first."""
    records = [file.record for row in rows for file in row.records]
    found = sorted({(r.kind != "pretrain", r.task.title, r.task.stage) for r in records})
    return list(dict.fromkeys(stage for _, _, stage in found))
