"""The steps that a suite gives its contenders, so that all train for the same time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_STEPS = "SOLVER.MAX_STEPS"


def with_steps(key: str, about: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contender with the steps that the suite gives it."""
    steps = values.get("steps", {}).get(key)
    if steps is None:
        return about
    return {**about, "overrides": {**about.get("overrides", {}), MAX_STEPS: steps}}


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
