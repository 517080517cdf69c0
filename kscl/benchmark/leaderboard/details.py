"""What evaluators put into a record's details; what is odd or missing counts as empty."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kscl.records.record import Record
from kscl.records.shape import LARGE

Series = tuple[list[float], list[float]]  # x, y

RANDOM = "random"  # weights that nothing was learned into
X_AXES = ("epoch", "step")


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


def interval(record: Record, metric: str, is_headline: bool) -> tuple[float, float] | None:
    """Return the evaluator's own interval of a metric; a bare pair is of the headline metric."""
    given = record.details.get("confidence_interval")
    if isinstance(given, dict):
        given = given.get(metric)
    elif not is_headline:
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
    """Tell whether an evaluation started from random weights, whatever they are called."""
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
    found = {}
    for name, value in mapping(given).items():
        found_value = number(value.get(metric) if isinstance(value, dict) else value)
        if found_value is not None:
            found[name] = found_value
    return found


def curves(record: Record) -> tuple[str, dict[str, Series]]:
    """Return the name of the x axis and the series by name, without points that are not numbers."""
    given = mapping(record.details.get("curves"))
    axis = next((name for name in X_AXES if isinstance(given.get(name), list)), "")
    found: dict[str, Series] = {}
    for name, values in given.items():
        if name in X_AXES or not isinstance(values, list):
            continue
        pairs = zip(given[axis], values, strict=False) if axis else enumerate(values)
        good = [(x, y) for x, y in pairs if number(x) is not None and number(y) is not None]
        if len(good) >= 2:
            found[name] = ([x for x, _ in good], [y for _, y in good])
    return axis or "point", found


def thinned(series: Series, points: int) -> Series:
    """Return at most `points` points, evenly spread, including the first and the last."""
    xs, ys = series
    if len(xs) <= points:
        return series
    indices = [round(i * (len(xs) - 1) / (points - 1)) for i in range(points)]
    return [xs[i] for i in indices], [ys[i] for i in indices]


def machine(record: Record) -> str:
    """Name the machine: its GPUs if it has any, and its cores otherwise."""
    gpus = record.hardware.get("gpus")
    if isinstance(gpus, list) and gpus:
        return f"{len(gpus)} x {gpus[0]}"
    cpu = text(record.hardware.get("cpu")) or "an unknown CPU"
    cores = number(record.hardware.get("cores"))
    return f"{'?' if cores is None else f'{cores:g}'} cores of {cpu}"
