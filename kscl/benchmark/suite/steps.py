"""The steps that a suite gives its contenders, so that all train for the same time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_STEPS = "SOLVER.MAX_STEPS"


def with_steps(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the contenders with the steps that the suite gives them, one for each length."""
    found: dict[str, dict[str, Any]] = {}
    for key, about in values["contenders"].items():
        steps = values.get("steps", {}).get(key)
        if steps is None:
            found[key] = about
            continue
        lengths = about.get("lengths", values.get("lengths", [1]))
        for length in lengths:
            overrides = {"LABEL": key, **about.get("overrides", {}), MAX_STEPS: length * steps}
            name = key if length == 1 else f"{key}_x{length}"  # so that suites can share length 1
            found[name] = {**about, "overrides": overrides, "lengths": (length,)}
            if isinstance(lengths, dict):
                found[name]["seeds"] = lengths[length]
    return found


def lengths_in_all(values: Mapping[str, Any]) -> int:
    """Return the sum of the lengths of all pretrainings with steps, over their seeds."""
    seeds = values.get("seeds", [0])
    with_pretraining = [about for about in with_steps(values).values() if "pretrain" in about]
    return sum(about["lengths"][0] * len(about.get("seeds", seeds)) for about in with_pretraining)


def length_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield pretrainings that should have several lengths and have no steps to multiply."""
    contenders, given = values.get("contenders"), values.get("steps")
    steps = given if isinstance(given, dict) else {}
    for key, about in contenders.items() if isinstance(contenders, dict) else ():
        if not isinstance(about, dict) or "pretrain" not in about or key in steps:
            continue
        if "lengths" in about or "lengths" in values:
            yield (
                f"contender {key}: lengths multiply steps, and it has none: let "
                "tools/equal_time.py write them, or remove the lengths."
            )


def step_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the steps of a suite."""
    contenders, given = values.get("contenders"), values.get("steps")
    if not isinstance(contenders, dict) or not isinstance(given, dict):
        return
    for key, steps in given.items():
        about = contenders.get(key)
        if not isinstance(about, dict) or "pretrain" not in about:
            yield f"steps: {key} is not a contender with a pretraining: remove it."
        elif type(steps) is not int or steps < 1:
            yield f"steps: {key} is {steps!r}; it must be a whole number from 1 on."
        elif MAX_STEPS in (about.get("overrides") or {}):
            yield f"steps: {key} has {MAX_STEPS} among its overrides too: remove one of them."
