"""Find image files with the same content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from kscl.runtime.files import sha256_of

TAIL_BYTES = 4096


def equal_files(left: Iterable[Path], right: Iterable[Path]) -> list[tuple[Path, Path]]:
    """Return (left, right) for each file on the right with the content of one on the left.

    Sizes are compared first, then the last bytes, then hashes: few files are read completely.
    """
    groups = [(list(left), list(right))]
    for key in (os.path.getsize, _tail, sha256_of):
        groups = [finer for group in groups for finer in _split_by(key, *group)]
    return [(lefts[0], path) for lefts, rights in groups for path in rights]


def _split_by(
    key: Callable[[Path], object], left: list[Path], right: list[Path]
) -> list[tuple[list[Path], list[Path]]]:
    found: dict[object, tuple[list[Path], list[Path]]] = {}
    for side, paths in enumerate((left, right)):
        for path in paths:
            found.setdefault(key(path), ([], []))[side].append(path)
    return [group for group in found.values() if group[0] and group[1]]


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, os.path.getsize(path) - TAIL_BYTES))
        return hashlib.md5(file.read()).digest()
