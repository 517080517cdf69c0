"""Configs: a tree of defaults, YAML files over it, KEY VALUE overrides over those.

Strict: a key that is not in the tree, a value of the wrong type and a value that cannot be are
errors, all reported at once, each with where it came from and the nearest valid name.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from fvcore.common.config import BASE_KEY, CfgNode

from kscl.config.defaults import pretrain_defaults
from kscl.config.rules import Broken, check_pretrain
from kscl.config.shipped import find_config
from kscl.config.tree import _plain, leaves, value_of
from kscl.errors import ConfigError

COMMAND_LINE = "command line"
IN_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def load_config(
    config_file: str | Path | None = None,
    overrides: Sequence[str] = (),
    defaults: Callable[[], CfgNode] = pretrain_defaults,
    rules: Callable[[CfgNode], Iterable[Broken]] = check_pretrain,
) -> CfgNode:
    """Merge defaults, file and overrides, check the whole, and return it frozen."""
    merge = _Merge(defaults())
    if config_file is not None:
        merge.file(find_config(config_file), ())
    merge.overrides(list(overrides))
    for keys, text in rules(merge.cfg):
        merge.problems.append(merge.describe(keys, text))
    if merge.problems:
        count = len(merge.problems)
        title = "1 problem" if count == 1 else f"{count} problems"
        lines = "\n".join(f"  {i}. {text}" for i, text in enumerate(merge.problems, 1))
        raise ConfigError(f"{title} in the configuration:\n{lines}")
    merge.cfg.freeze()
    return merge.cfg


def nearest_keys(key: str, keys: Iterable[str]) -> list[str]:
    """Valid keys that someone who wrote `key` may have meant, best first."""
    by_upper = {name.upper(): name for name in keys}
    last = key.upper().rsplit(".", 1)[-1]
    same_name = [name for upper, name in by_upper.items() if upper.rsplit(".", 1)[-1] == last]
    close = difflib.get_close_matches(key.upper(), list(by_upper), n=3, cutoff=0.6)
    return list(dict.fromkeys([*same_name, *(by_upper[name] for name in close)]))[:3]


@dataclass
class _Merge:
    """A config in the making: its values so far, where each came from, and what was wrong."""

    cfg: CfgNode
    problems: list[str] = field(default_factory=list)
    origin: dict[str, str] = field(default_factory=dict)

    def file(self, path: Path, chain: tuple[Path, ...]) -> None:
        if path.resolve() in chain:
            names = " → ".join(p.name for p in (*chain, path))
            raise ConfigError(f"{path}: {BASE_KEY} goes round in a circle: {names}")
        try:
            loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
            root = loader.get_single_node()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not YAML: {error}") from error
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}: a config is a mapping of keys to values")
        for name, node in root.value:
            if name.value == BASE_KEY:
                bases = node.value if isinstance(node, yaml.SequenceNode) else [node]
                for base in bases:
                    self.base(base, path, (*chain, path.resolve()))
        self.mapping("", root, path, loader)

    def base(self, node: yaml.Node, path: Path, chain: tuple[Path, ...]) -> None:
        target = path.parent / Path(str(node.value)).expanduser()
        if not target.is_file():
            self.problems.append(f"{_at(path, node)}: {BASE_KEY} {node.value}: no such file")
            return
        self.file(target, chain)

    def mapping(
        self, prefix: str, mapping: yaml.MappingNode, path: Path, loader: yaml.SafeLoader
    ) -> None:
        seen = set()
        for name, node in mapping.value:
            key = f"{prefix}{name.value}"
            if key == BASE_KEY:
                continue
            if key in seen:
                self.problems.append(f"{_at(path, name)}: {key} stands twice in one file")
                continue
            seen.add(key)
            is_section = isinstance(self.get(key), CfgNode)
            if is_section and isinstance(node, yaml.MappingNode):
                self.mapping(f"{key}.", node, path, loader)
                continue
            try:
                value = loader.construct_object(node, deep=True)
            except yaml.YAMLError:
                self.problems.append(
                    f"{_at(path, node)}: {key}: the tag {node.tag} is not plain YAML, and nothing "
                    "is run from a config file: write the value itself"
                )
                continue
            self.set(key, value, _at(path, name))

    def overrides(self, words: list[str]) -> None:
        options = [word for word in words if word.startswith("--")]
        if options:
            self.problems.append(
                f"{COMMAND_LINE}: {options[0]} stands among the overrides KEY VALUE, which come "
                "last: put it before them"
            )
            return
        if len(words) % 2:
            self.problems.append(
                f"{COMMAND_LINE}: overrides are pairs KEY VALUE, and '{words[-1]}' is left over"
            )
        for key, text in zip(words[::2], words[1::2], strict=False):
            self.set(key, _parse(text, self.get(key)), COMMAND_LINE)

    def get(self, key: str) -> object:
        try:
            return value_of(self.cfg, key)
        except (KeyError, TypeError):
            return None

    def set(self, key: str, value: object, where: str) -> None:
        parent, _, name = key.rpartition(".")
        section = self.get(parent) if parent else self.cfg
        free = isinstance(section, CfgNode) and section.is_new_allowed()
        default = self.get(key)
        if free:
            section[name] = value  # type: ignore[index]
        elif isinstance(default, CfgNode):
            if default.is_new_allowed() and isinstance(value, dict):
                for child, child_value in value.items():
                    self.set(f"{key}.{child}", child_value, where)
                return
            keys = ", ".join(default) or "any name"
            self.problems.append(f"{where}: {key} is a section with keys of its own: {keys}")
        elif default is None:
            valid = [name for name, _ in leaves(_plain(self.cfg))]
            nearest = nearest_keys(key, valid if "." in key else [*valid, *self.cfg])
            hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
            self.problems.append(f"{where}: {key} is not a key{hint}")
        else:
            try:
                section[name] = _as_type_of(default, value)  # type: ignore[index]
            except TypeError as error:
                self.problems.append(f"{where}: {key} takes {error}, not {value!r}")
                return
        self.origin[key] = where

    def describe(self, keys: tuple[str, ...], text: str) -> str:
        """A broken rule, with the values it concerns and where they came from."""
        values = []
        for key in keys:
            origin = self.origin.get(key, "default")
            values.append(f"{key} is {value_of(self.cfg, key)!r} ({origin})")
        return f"{', '.join(values)}: {text}" if values else text


def _at(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def _parse(text: str, default: object) -> object:
    """The value of an override; where text is wanted it is taken to the letter."""
    if isinstance(default, str):
        return text
    for parse in (yaml.safe_load, ast.literal_eval):  # the second for (1, 2), as Detectron2 has it
        try:
            value = parse(text)
        except (yaml.YAMLError, ValueError, SyntaxError):
            continue
        if not isinstance(value, str):
            return list(value) if isinstance(value, tuple) else value
    return text


def _as_type_of(default: object, value: object) -> object:
    """The value as the default's type; TypeError says in words what is wanted."""
    if isinstance(default, list):
        if not isinstance(value, list | tuple):
            raise TypeError("a list")
        kinds = {type(item) for item in default}
        if len(kinds) == 1 and kinds <= {int, float, str}:
            return [_as_type_of(default[0], item) for item in value]
        return list(value)
    wanted = type(default)
    if isinstance(value, bool) is not (wanted is bool):
        raise TypeError(IN_WORDS[wanted])
    if wanted is float and isinstance(value, int | str):  # YAML 1.1 reads 1e-4 as text
        try:
            return float(value)
        except ValueError:
            raise TypeError(IN_WORDS[float]) from None
    if not isinstance(value, wanted):
        raise TypeError(IN_WORDS[wanted])
    return value
