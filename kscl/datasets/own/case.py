"""Class names that differ only by case: refused, united, or kept apart, as the user decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kscl.data.annotated.annotations import Problem

CLASS_NAMES = "class names"  # the kind of problem that no image is to blame for


def unite_case(
    counts: Counter[str], merge: bool | None, unit: str, first: Callable[[str], str]
) -> tuple[dict[str, str], list[Problem]]:
    """Return the new names of classes, and a problem for each name to decide on.

    `counts` are of `unit`, object or image; the most frequent spelling is kept. `first` tells
    where a name occurs.
    """
    spellings: dict[str, list[str]] = {}
    for name, _ in counts.most_common():
        spellings.setdefault(name.casefold(), []).append(name)
    several = [names for names in spellings.values() if len(names) > 1]
    if merge is None:
        return {}, [_undecided(names, counts, unit, first) for names in several]
    return ({name: names[0] for names in several for name in names} if merge else {}), []


def _undecided(
    names: list[str], counts: Counter[str], unit: str, first: Callable[[str], str]
) -> Problem:
    what = " and ".join(
        f"'{name}' ({counts[name]} {unit}{'s' if counts[name] > 1 else ''}, first in {first(name)})"
        for name in names
    )
    fix = f"--merge-case makes them all '{names[0]}', --keep-case keeps them apart"
    return Problem(CLASS_NAMES, what, "differ only by case", fix)
