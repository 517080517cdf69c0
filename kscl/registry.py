"""Named parts that others can add: a module registers its part, and `--import MODULE` loads it.

A registry maps a name to a part, or to the module that registers it when it is imported: names are
known, and can be checked, before anything heavy is loaded.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from kscl.errors import KsclError

IMPORT_VARIABLE = "KSCL_IMPORT"  # modules to import in processes that this one starts

Part = TypeVar("Part")


class Registry(UserDict[str, Any], Generic[Part]):
    """Parts by name, in the order in which they were registered; a text is a module."""

    def __init__(self, what: str, modules: Mapping[str, str] | None = None) -> None:
        super().__init__(modules or {})
        self.what = what

    def register(self, name: str, part: Part) -> Part:
        """Add a part; a name that another part has is an error."""
        before = self.data.get(name)
        if before is not None and not isinstance(before, str):
            modules = [getattr(each, "__module__", "") for each in (before, part)]
            where = f" ({' and '.join(modules)})" if all(modules) else ""
            raise KsclError(f"There are two of the {self.what} '{name}'{where}. Rename one.")
        self.data[name] = part
        return part

    def __getitem__(self, name: str) -> Part:
        """Return a part, loading its module first; an unknown name is an error that lists all."""
        if name not in self.data:
            raise KsclError(f"There is no {self.what} '{name}': choose {', '.join(self.data)}.")
        if isinstance(module := self.data[name], str):
            importlib.import_module(module)
        part = self.data[name]
        assert not isinstance(part, str)  # its module has registered it
        return part

    def loaded(self) -> dict[str, Part]:
        """Return the parts whose modules were imported."""
        return {name: part for name, part in self.data.items() if not isinstance(part, str)}


def imported_modules() -> list[str]:
    """Return the modules that --import has brought."""
    return os.environ.get(IMPORT_VARIABLE, "").split()


def import_modules(names: Sequence[str] = ()) -> None:
    """Import modules that register parts, here and in all processes that this one starts."""
    wanted = dict.fromkeys([*imported_modules(), *names])
    if wanted and "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a file beside the command is found by its name
    for name in wanted:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise KsclError(
                f"--import {name}: {error}. Give a module of Python's path or of the current "
                "folder, without .py."
            ) from error
    if wanted:
        os.environ[IMPORT_VARIABLE] = " ".join(wanted)


# Pretraining methods (`METHOD.NAME`).
METHODS: Registry = Registry(
    "method", {name: f"kscl.methods.{name}" for name in ("kscl", "byol", "vicreg")}
)
# The ways to compare a query with an instance (`METHOD.SIMILARITY`).
SIMILARITIES: Registry = Registry(
    "similarity",
    dict.fromkeys(
        ("projection", "cosine", "mean_cosine", "main_cosine"), "kscl.methods.similarity"
    ),
)
# Where KSCL's negatives come from (`DICTIONARY.TYPE`).
DICTIONARIES: Registry = Registry(
    "dictionary", dict.fromkeys(("queue", "minibatch", "memory_bank"), "kscl.methods.dictionary")
)
