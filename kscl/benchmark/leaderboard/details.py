"""What evaluators put into a record's details, read with patience: odd or missing is empty."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kscl.records.record import Json

Series = tuple[list[float], list[float]]  # x, y

X_AXES = ("epoch", "step")
LARGE = 1e15


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def inside(values: object, *keys: str) -> Any:
    """values[a][b]..., or None where the way ends."""
    for key in keys:
        values = mapping(values).get(key)
    return values


def text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def number(value: object) -> float | None:
    """A finite number of a size that can be computed with."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < LARGE and math.isfinite(value) else None


def interval(record: Json, metric: str, is_headline: bool) -> tuple[float, float] | None:
    """The evaluator's own interval of a metric; a bare pair belongs to the headline metric."""
    given = record["details"].get("confidence_interval")
    if isinstance(given, dict):
        given = given.get(metric)
    elif not is_headline:
        return None
    if not isinstance(given, list) or len(given) != 2:
        return None
    low, high = number(given[0]), number(given[1])
    return None if low is None or high is None or low > high else (low, high)


def image_count(record: Json) -> int | None:
    n = number(record["details"].get("n"))
    return int(n) if n is not None and n >= 1 else None


def per_class(record: Json, metric: str) -> dict[str, float]:
    """Class name → value, whichever of the three layouts the evaluator chose."""
    details = record["details"]
    given = details.get("per_class")
    if isinstance(given, list):
        names = details.get("classes")
        if not isinstance(names, list) or len(names) != len(given):
            return {}
        given = dict(zip(map(str, names), given, strict=True))
    found = {}
    for name, value in mapping(given).items():
        found_value = number(value.get(metric) if isinstance(value, dict) else value)
        if found_value is not None:
            found[name] = found_value
    return found


def curves(record: Json) -> tuple[str, dict[str, Series]]:
    """(name of the x axis, series by name); pairs that hold no two numbers are left out."""
    given = mapping(record["details"].get("curves"))
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
    """At most so many points, evenly spread, the first and the last among them."""
    xs, ys = series
    if len(xs) <= points:
        return series
    places = [round(i * (len(xs) - 1) / (points - 1)) for i in range(points)]
    return [xs[i] for i in places], [ys[i] for i in places]
