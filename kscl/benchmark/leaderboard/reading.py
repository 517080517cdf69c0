"""Read records for the board: every distinct one, and what evaluators put into their details.

Whatever is odd or missing in a record counts as empty; a file that is not counted is named.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kscl.errors import printable
from kscl.records.record import LARGE, Record, RecordError, find_records

Series = tuple[list[float], list[float]]  # x, y

RANDOM = "random"  # weights that nothing was learned into
X_AXES = ("epoch", "step")


@dataclass(frozen=True)
class RecordFile:
    """A record, the file it was read from, and how that file is called in the outputs."""

    record: Record
    path: Path
    root: Path  # nothing outside of it is ever read into an output
    shown: str

    @property
    def id(self) -> str:
        """Return the record's id."""
        return self.record.id


@dataclass
class Reading:
    """The records to count, and one line for each file that is not counted."""

    records: list[RecordFile] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_folders(folders: Sequence[str | Path]) -> Reading:
    """Return all records below the folders, each once, in an order that depends only on them."""
    reading = Reading()
    seen: dict[str, RecordFile] = {}
    files: set[str] = set()  # met before, through a folder given twice or inside another
    for folder in folders:
        root = Path(folder)
        found = find_records(root)
        prefix = f"{Path(os.path.realpath(root)).name}/" if len(folders) > 1 else ""
        both: dict[Path, str | Record] = {**found.problems, **found.records}
        for path, it in both.items():
            if (real := os.path.realpath(path)) in files:
                continue
            files.add(real)
            name = path.name if root.is_file() else path.relative_to(root).as_posix()
            shown = printable(prefix + name)
            if isinstance(it, str):
                reading.problems.append(f"{shown}: {it}")
                continue
            file = RecordFile(it, path, root.parent if root.is_file() else root, shown)
            first = seen.setdefault(file.id, file)
            if first is not file:
                reading.problems.append(
                    f"{shown}: It is the same record as {first.shown}, which is counted once."
                )
    if not seen:
        searched = ", ".join(str(folder) for folder in folders)
        reasons = "".join(f"\n  {problem}" for problem in reading.problems)
        raise RecordError(f"{searched}: There is no record to make a leaderboard of.{reasons}")
    reading.records = sorted(seen.values(), key=lambda file: (file.record.created, file.id))
    return reading


def mapping(value: object) -> Mapping[str, Any]:
    """Return the value if it is a mapping, and an empty one otherwise."""
    return value if isinstance(value, dict) else {}


def inside(values: object, *keys: str) -> Any:
    """Return values[a][b]…, or None if a key is missing."""
    for key in keys:
        values = mapping(values).get(key)
    return values


def text(value: object) -> str | None:
    """Return the value if it is text that is not empty."""
    return value if isinstance(value, str) and value else None


def number(value: object) -> float | None:
    """Return the value if it is a finite number of a size that can be computed with."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < LARGE and math.isfinite(value) else None


def interval(record: Record, metric: str) -> tuple[float, float] | None:
    """Return the evaluator's own interval of a metric; a bare pair is of the headline metric."""
    given = record.details.get("confidence_interval")
    if isinstance(given, dict):
        given = given.get(metric)
    elif metric != record.task.headline.name:
        return None
    if not isinstance(given, list) or len(given) != 2:
        return None
    low, high = number(given[0]), number(given[1])
    return None if low is None or high is None or low > high else (low, high)


def image_count(record: Record) -> int | None:
    """Return the number of test images."""
    n = number(record.details.get("n"))
    return int(n) if n is not None and n >= 1 else None


def warnings(record: Record) -> list[str]:
    """Return what the evaluator warns of, such as a choice at the edge of its grid."""
    given = record.details.get("warnings")
    return [words for words in given if text(words)] if isinstance(given, list) else []


def is_random(record: Record) -> bool:
    """Return whether an evaluation started from random weights, whatever they are called."""
    about = mapping(record.details.get("backbone"))
    layout = inside(record.details, "certificate", "source", "layout")
    return RANDOM in (about.get("weights"), about.get("method"), about.get("layout"), layout)


def per_class(record: Record, metric: str) -> dict[str, float]:
    """Return class name → value, whichever of the three layouts the evaluator chose."""
    given = record.details.get("per_class")
    if isinstance(given, list):
        names = record.details.get("classes")
        if not isinstance(names, list) or len(names) != len(given):
            return {}
        given = dict(zip(map(str, names), given, strict=True))
    values = {
        name: number(value.get(metric) if isinstance(value, dict) else value)
        for name, value in mapping(given).items()
    }
    return {name: value for name, value in values.items() if value is not None}


def curves(record: Record, points: int) -> tuple[str, dict[str, Series]]:
    """Return the name of the x axis and the series by name, each with at most so many points."""
    given = mapping(record.details.get("curves"))
    axis = next((name for name in X_AXES if isinstance(given.get(name), list)), "")
    found: dict[str, Series] = {}
    for name, values in given.items():
        if name in X_AXES or not isinstance(values, list):
            continue
        pairs = zip(given[axis], values, strict=False) if axis else enumerate(values)
        good = [(x, y) for x, y in pairs if number(x) is not None and number(y) is not None]
        if len(good) > points:  # evenly spread, with the first and the last
            good = [good[round(i * (len(good) - 1) / (points - 1))] for i in range(points)]
        if len(good) >= 2:
            found[name] = ([x for x, _ in good], [y for _, y in good])
    return axis or "point", found


def machine(record: Record) -> str:
    """Name the machine: its GPUs if it has any, and its cores otherwise."""
    gpus = record.hardware.get("gpus")
    if isinstance(gpus, list) and gpus:
        return f"{len(gpus)} x {gpus[0]}"
    cpu = text(record.hardware.get("cpu")) or "an unknown CPU"
    cores = number(record.hardware.get("cores"))
    return f"{'?' if cores is None else f'{cores:g}'} cores of {cpu}"
