"""Take out of a record what says where and by whom it was made: absolute paths, user, host."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import socket
from typing import Any

LEAST_LETTERS = 3  # of a name that is looked for; shorter ones are in half of all words
COMMON_NAMES = ("root", "user", "localhost", "runner")  # name nobody
# A path from the root of a file system: at the start of a text or behind what separates words; two
# slashes are those of an address such as https://.
UNIX = r"""(?:(?<=[\s:=,;'"(\[|])|^)~?/(?!/)[^\s:,;'"()\[\]|]+"""
WINDOWS = r"""(?:(?<=[\s=,;'"(\[|])|^)[A-Za-z]:[\\/][^\s,;'"()\[\]|]+"""
ABSOLUTE = re.compile(f"{UNIX}|{WINDOWS}")
NOT_WORDS = ("right",)  # bits as base64, in which a slash is a digit
HIDDEN = "…/"  # stands for the folders that were taken out


def without_private(value: Any) -> Any:
    """Return JSON content with shortened paths and without the names of user and host.

    A path below the working folder becomes a relative one; of another, the last part is left.
    """
    named = "|".join(rf"\b{re.escape(name)}\b" for name in _names())
    return _public(value, re.compile(named or r"(?!)"))


def _public(value: Any, names: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return names.sub("…", ABSOLUTE.sub(_shortened, value))
    if isinstance(value, dict):
        return {
            _public(key, names): inner if key in NOT_WORDS else _public(inner, names)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_public(inner, names) for inner in value]
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


def _names() -> list[str]:
    """Return the names of host and user, but for those that name nobody."""
    host = socket.gethostname()
    found = [host, host.partition(".")[0]]
    with contextlib.suppress(OSError, KeyError):  # a user id without a name
        found.append(getpass.getuser())
    return [name for name in found if len(name) >= LEAST_LETTERS and name not in COMMON_NAMES]
