"""What is wrong with the numbers of a suite: seeds, lengths and estimates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def number_lists(where: str, about: Mapping[str, Any]) -> Iterator[str]:
    """Yield lists that do not hold different whole numbers."""
    for key, least in (("seeds", 0), ("lengths", 1)):
        given = about.get(key, [1])
        if key == "lengths" and isinstance(given, dict):
            for length, seeds in given.items():
                yield from number_lists(f"{where}: length {length}", {"seeds": seeds})
            given = list(given)
        good = isinstance(given, list) and given and all(type(n) is int for n in given)
        if not good or min(given) < least or len(set(given)) != len(given):
            yield f"{where}: {key} is {given!r}; it must be a list of different whole numbers."


def estimate_problems(given: Mapping[Any, Any], kinds: Sequence[str]) -> Iterator[str]:
    """Yield estimates of stages that a suite cannot have, or that are no seconds."""
    for kind, seconds in given.items():
        if kind not in kinds:
            yield f"estimates: {kind} is not a kind of stage; choose from {', '.join(kinds)}."
        elif type(seconds) not in (int, float) or not 0 <= seconds < float("inf"):
            yield f"estimates: {kind} is {seconds!r}; it must be a number of seconds."
