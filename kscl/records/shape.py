"""Check JSON content against a dataclass: its fields are the keys, its type hints the types."""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
import typing
from collections.abc import Iterator
from types import UnionType
from typing import Any

from kscl.errors import printable

LARGE = 1e15  # sums and squares of smaller numbers stay finite
MAX_DEPTH = 64
MAX_LISTED = 5

WORDS: dict[Any, str] = {
    str: "text",
    int: "a whole number of 64 bits",
    float: f"a finite number below {LARGE:g}",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    type(None): "null",
}


def wrong_places(content: object, wanted: Any, name: str = "") -> Iterator[str]:
    """Yield one phrase for each key that is missing, unknown or of another type than `wanted`."""
    if dataclasses.is_dataclass(wanted):
        yield from _wrong_fields(content, wanted, name)
    elif typing.get_origin(wanted) is dict:
        if not isinstance(content, dict):
            yield f"{name} is {shown(content)}, not {WORDS[dict]}"
            return
        of_value = typing.get_args(wanted)[1]
        if of_value is not Any:
            for key, value in content.items():
                yield from wrong_places(value, of_value, f"{name}.{one_line(key)}")
    elif typing.get_origin(wanted) is list:
        if not isinstance(content, list):
            yield f"{name} is {shown(content)}, not {WORDS[list]}"
            return
        for number, value in enumerate(content):
            yield from wrong_places(value, typing.get_args(wanted)[0], f"{name}.{number}")
    else:
        choices = typing.get_args(wanted) if isinstance(wanted, UnionType) else (wanted,)
        if not any(_is(content, choice) for choice in choices):
            words = " or ".join(WORDS[choice] for choice in choices)
            yield f"{name} is {shown(content)}, not {words}"


def is_too_deep(content: object) -> bool:
    """Tell whether containers are nested beyond `MAX_DEPTH`; does not recurse itself."""
    layer, depth = [content], 0
    while layer:
        inner: list[object] = []
        for item in layer:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        layer, depth = inner, depth + 1
        if depth > MAX_DEPTH:
            return True
    return False


def shown(value: object) -> str:
    """Return a value as short text on one line, however large it is."""
    return one_line(reprlib.repr(value))


def one_line(text: str) -> str:
    """Return the text in printable characters, without its middle if it is long."""
    return printable(text if len(text) <= 200 else f"{text[:100]}…{text[-90:]}")


def listed(problems: list[str]) -> str:
    """Join the first few problems, and count the others."""
    more = len(problems) - MAX_LISTED
    return "; ".join(problems[:MAX_LISTED]) + (f"; and {more:,} more" if more > 0 else "")


def _wrong_fields(content: object, wanted: Any, name: str) -> Iterator[str]:
    if not isinstance(content, dict):
        yield f"{name} is {shown(content)}, not {WORDS[dict]}"
        return
    hints = _hints(wanted)
    prefix = f"{name}." if name else ""
    for key, hint in hints.items():
        if key not in content:
            yield f"{prefix}{key} is missing"
        else:
            yield from wrong_places(content[key], hint, f"{prefix}{key}")
    yield from (f"{prefix}{one_line(key)} is not a field" for key in content if key not in hints)


@functools.cache  # resolving them anew was a third of the time of reading a record
def _hints(wanted: Any) -> dict[str, Any]:
    return typing.get_type_hints(wanted)


def _is(value: object, wanted: Any) -> bool:
    if wanted is float:
        is_number = type(value) in (int, float)
        return is_number and abs(value) < LARGE and math.isfinite(value)  # type: ignore
    if wanted is int:
        return type(value) is int and -(2**63) <= value < 2**63
    return type(value) is wanted
