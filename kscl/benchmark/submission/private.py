"""Take out of a record what says where and by whom it was made: absolute paths, user, host."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import socket
from collections.abc import Sequence
from typing import Any

LEAST_LETTERS = 3  # of a name that is looked for; shorter ones are in half of all words
COMMON_NAMES = ("root", "user", "localhost", "runner")  # name nobody
# A path from the root of a file system: at the start of a text or behind what separates words; two
# slashes are those of an address such as https://.
UNIX = r"""(?:(?<=[\s:=,;'"(\[|])|^)~?/(?!/)[^\s:,;'"()\[\]|]+"""
WINDOWS = r"""(?:(?<=[\s=,;'"(\[|])|^)[A-Za-z]:[\\/][^\s,;'"()\[\]|]+"""
ABSOLUTE = re.compile(f"{UNIX}|{WINDOWS}")
HIDDEN = "…/"  # stands for the folders that were taken out


def without_private(value: Any, names: Sequence[str] | None = None) -> Any:
    """Return JSON content with shortened paths and without the names of user and host.

    A path below the working folder becomes a relative one; of another, the last part is left.
    """
    words = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in _names(names)) or r"(?!)")
    if isinstance(value, str):
        return words.sub("…", ABSOLUTE.sub(_shortened, value))
    if isinstance(value, dict):
        return {without_private(k, names): without_private(v, names) for k, v in value.items()}
    if isinstance(value, list):
        return [without_private(inner, names) for inner in value]
    return value


def absolute_path(text: str) -> str | None:
    """Return the first absolute path in a text."""
    found = ABSOLUTE.search(text)
    return found.group() if found else None


def _shortened(found: re.Match[str]) -> str:
    path = found.group()
    here = os.path.join(os.getcwd(), "")
    if path.startswith(here):
        return path[len(here) :] or "."
    return HIDDEN + re.split(r"[\\/]", path.rstrip("\\/"))[-1]


def _names(given: Sequence[str] | None) -> list[str]:
    if given is None:
        given = [socket.gethostname(), socket.gethostname().partition(".")[0]]
        with contextlib.suppress(OSError, KeyError):  # a user id without a name
            given.append(getpass.getuser())
    return [name for name in given if len(name) >= LEAST_LETTERS and name not in COMMON_NAMES]
