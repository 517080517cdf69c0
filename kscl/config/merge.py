"""Configs: a tree of defaults, YAML files over it, KEY VALUE overrides over those.

The merge is strict: a key that is not in the tree, a value of the wrong type and a value that
breaks a rule are errors. All of them are reported at once, each with where it came from and the
nearest valid name.
"""

from __future__ import annotations

import ast
import copy
import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from fvcore.common.config import BASE_KEY, CfgNode

from kscl.config.defaults import pretrain_defaults
from kscl.config.reader import YamlFile, raise_problems, read_with_bases
from kscl.config.renamed import new_key, old_value
from kscl.config.rules import Broken, check_pretrain
from kscl.config.shipped import find_config
from kscl.config.tree import leaves, value_at
from kscl.errors import ConfigError
from kscl.views.recipes import RECIPES

COMMAND_LINE = "command line"
IN_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
# Values that have a name. The resolved config holds the value itself: hashes do not tell a recipe
# from the same list written out.
NAMED_VALUES: dict[str, dict[str, Any]] = {
    "AUGMENT": dict(RECIPES),
    "AUGMENT_KEYS": dict(RECIPES),
}

# Numbers that may be a list as well, which a rule checks.
SCHEDULES = ("INPUT.SIZE",)
# Lists that may be null, in a file over one that sets them too.
OPTIONAL_LISTS = ("AUGMENT_KEYS",)

_MISSING = object()


def load_config(
    config_file: str | Path | None = None,
    overrides: Sequence[str] = (),
    defaults: Callable[[], CfgNode] = pretrain_defaults,
    rules: Callable[[CfgNode], Iterable[Broken]] = check_pretrain,
    check_items: bool = True,
) -> CfgNode:
    """Return the merge of defaults, file and overrides, checked as a whole and frozen.

    With `check_items` the items of a list have the type that they have in the default.
    """
    merge = _Merge(defaults(), check_items)
    if config_file is not None:
        for file in read_with_bases(find_config(config_file), merge.problems):
            merge.mapping("", file.root, file)
    merge.overrides(list(overrides))
    for keys, text in rules(merge.cfg):
        merge.problems.append(merge.describe(keys, text))
    raise_problems(merge.problems, "the configuration")
    merge.cfg.freeze()
    return merge.cfg


def nearest_keys(key: str, keys: Iterable[str]) -> list[str]:
    """Return valid keys that someone who wrote `key` may have meant, best first."""
    by_upper = {name.upper(): name for name in keys}
    last = key.upper().rsplit(".", 1)[-1]
    same_name = [name for upper, name in by_upper.items() if upper.rsplit(".", 1)[-1] == last]
    close = difflib.get_close_matches(key.upper(), list(by_upper), n=3, cutoff=0.6)
    return list(dict.fromkeys([*same_name, *(by_upper[name] for name in close)]))[:3]


@dataclass
class _Merge:
    """A config in the making: its values so far, where each came from, and what was wrong."""

    cfg: CfgNode
    check_items: bool
    problems: list[str] = field(default_factory=list)
    origin: dict[str, str] = field(default_factory=dict)

    def mapping(self, prefix: str, mapping: yaml.MappingNode, file: YamlFile) -> None:
        """Set all keys of a mapping, those of its sections too."""
        for name, node in mapping.value:
            key = f"{prefix}{name.value}"
            if key == BASE_KEY:
                continue
            if isinstance(node, yaml.MappingNode) and self.is_section(key, node):
                self.mapping(f"{key}.", node, file)
                continue
            try:
                self.set(key, file.value(node, key), file.at(name))
            except ConfigError as error:
                self.problems.append(str(error))

    def is_section(self, key: str, node: yaml.MappingNode) -> bool:
        """Tell a section from a value; in an unknown section every key is named as unknown."""
        known = self.get(key)
        if known is _MISSING:
            return bool(node.value) and not self.is_free(key)
        return isinstance(known, CfgNode)

    def overrides(self, words: list[str]) -> None:
        """Set the pairs KEY VALUE of the command line."""
        options = [word for word in words if word.startswith("--")]
        if options:
            self.problems.append(
                f"{COMMAND_LINE}: {options[0]} is among the overrides KEY VALUE, which come last. "
                "Put it before them."
            )
            return
        if len(words) % 2:
            self.problems.append(
                f"{COMMAND_LINE}: Overrides are pairs KEY VALUE, and '{words[-1]}' is left over."
            )
        for key, text in zip(words[::2], words[1::2], strict=False):
            is_text = isinstance(self.get(key), str)
            self.set(key, text if is_text else _parse(text), COMMAND_LINE)

    def get(self, key: str) -> Any:
        """Return the value of a key so far, or _MISSING."""
        try:
            return value_at(self.cfg, key)
        except KeyError:
            return _MISSING

    def is_free(self, key: str) -> bool:
        """Tell whether a key is in a section that takes any key."""
        parent = self.get(key.rpartition(".")[0]) if "." in key else self.cfg
        return isinstance(parent, CfgNode) and parent.is_new_allowed()

    def set(self, key: str, value: Any, where: str) -> None:
        """Set one key to a value of its type, or report why not."""
        parent, _, name = key.rpartition(".")
        section = self.get(parent) if parent else self.cfg
        default = self.get(key)
        if self.is_free(key):
            section[name] = value
        elif isinstance(default, CfgNode):
            if default.is_new_allowed() and isinstance(value, dict):
                for child, child_value in value.items():
                    self.set(f"{key}.{child}", child_value, where)
                return
            keys = ", ".join(default) or "any name"
            self.problems.append(f"{where}: {key} is a section with keys of its own: {keys}.")
        elif default is _MISSING:
            self.problems.append(f"{where}: {self.unknown(key)}")
        elif old := old_value(key, value):
            self.problems.append(f"{where}: {key} {old[0]} has been renamed: write {old[1]}.")
        else:
            try:
                section[name] = self.typed(key, default, value)
            except TypeError as error:
                self.problems.append(f"{where}: {key} takes {error}, not {value!r}.")
                return
        self.origin[key] = where

    def typed(self, key: str, default: Any, value: Any) -> Any:
        """Return the value as the default's type, or the value that it names."""
        names = NAMED_VALUES.get(key, {})
        if key in SCHEDULES:
            value = _parse(value) if isinstance(value, str) else value
            if isinstance(value, list | tuple):
                return copy.deepcopy(list(value))
            default = 0
        if isinstance(value, str) and value in names:
            return copy.deepcopy(names[value])
        if key in OPTIONAL_LISTS:
            value = _parse(value) if isinstance(value, str) else value
            if value is None:
                return None
            default = []
        try:
            return as_type_of(default, value, self.check_items)
        except TypeError as error:
            choice = f" or one of {', '.join(names)}" if names else ""
            raise TypeError(f"{error}{choice}") from None

    def unknown(self, key: str) -> str:
        """Return what to say of a key that is not in the tree."""
        new = new_key(key)
        if new is not None and self.get(new) is not _MISSING:
            return f"{key} has been renamed: write {new}."
        valid = [name for name, _ in leaves(self.cfg)]
        nearest = nearest_keys(key, valid if "." in key else [*valid, *self.cfg])
        hint = f"; did you mean {' or '.join(nearest)}?" if nearest else "."
        return f"{key} is not a key{hint}"

    def describe(self, keys: tuple[str, ...], text: str) -> str:
        """Return a broken rule with the values it concerns and where they came from."""
        values = []
        for key in keys:
            origin = self.origin.get(key, "default")
            values.append(f"{key} is {value_at(self.cfg, key)!r} ({origin})")
        text = f"{', '.join(values)}: {text}" if values else text
        return text if text.endswith((".", "?", "!")) else f"{text}."


def as_type_of(default: Any, value: Any, check_items: bool = False) -> Any:
    """Return the value as the default's type; TypeError says in words what is wanted."""
    if isinstance(value, str) and not isinstance(default, str):
        value = _parse(value)
    if default is None:
        return value
    wanted = type(default)
    if isinstance(default, list | tuple):
        if not isinstance(value, list | tuple):
            raise TypeError("a list")
        kinds = {type(item) for item in default}
        if check_items and len(kinds) == 1 and kinds <= set(IN_WORDS):
            value = [as_type_of(default[0], item) for item in value]
        if kinds == {tuple}:  # of tuples, which are lists to YAML
            value = [tuple(item) if isinstance(item, list) else item for item in value]
        return wanted(value)
    if isinstance(value, bool) is not (wanted is bool):
        raise TypeError(IN_WORDS[wanted])
    if wanted is float and isinstance(value, int | str):  # "nan" and "inf" are text to YAML
        try:
            return float(value)
        except ValueError:
            raise TypeError(IN_WORDS[float]) from None
    if not isinstance(value, wanted):
        raise TypeError(IN_WORDS[wanted])
    return value


def _parse(text: str) -> Any:
    """Return the value that a text stands for: Python's notation, as Detectron2 has it, or YAML.

    Python's comes first, as `1e-4` and `('a: b',)` are something else to YAML 1.1.
    """
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            return text
    return list(value) if isinstance(value, tuple) else value
