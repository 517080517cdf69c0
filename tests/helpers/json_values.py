"""Every value of a JSON content, and the content with one of them replaced."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any


def paths_in(node: object, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path to every value inside of a content, containers included."""
    if path:
        yield path
    items = enumerate(node) if isinstance(node, list) else getattr(node, "items", tuple)()
    for key, value in items:
        yield from paths_in(value, (*path, key))


def replaced(content: Any, path: tuple, value: object) -> Any:
    """Return a copy that has this value at the path."""
    content = copy.deepcopy(content)
    node = content
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return content
