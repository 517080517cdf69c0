"""Read YAML files strictly: plain data only, every key once, and the files of `_BASE_` first.

Every config and suite file of the project is read here, so that all errors name the file and line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from fvcore.common.config import BASE_KEY

from kscl.config.shipped import find_config
from kscl.config.tree import leaves
from kscl.errors import ConfigError


@dataclass(frozen=True)
class YamlFile:
    """One file as a tree of YAML nodes, which know their line numbers."""

    path: Path
    root: yaml.MappingNode
    loader: yaml.SafeLoader

    def at(self, node: yaml.Node) -> str:
        """Return where a node is, as `file:line`."""
        return f"{self.path}:{node.start_mark.line + 1}"

    def value(self, node: yaml.Node) -> Any:
        """Return the plain value of a node; raise ConfigError for a tag that would run code."""
        try:
            return self.loader.construct_object(node, deep=True)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None) or node.start_mark
            raise ConfigError(
                f"{self.path}:{mark.line + 1}: {getattr(error, 'problem', error)}. Nothing is run "
                "from a config file: write the value itself."
            ) from error


def read_with_bases(
    path: Path, problems: list[str], chain: tuple[Path, ...] = ()
) -> list[YamlFile]:
    """Return the files that a config consists of, bases first; add what is wrong to `problems`."""
    if path.resolve() in chain:
        names = " → ".join(file.name for file in (*chain, path))
        raise ConfigError(f"{path}: {BASE_KEY} forms a circle: {names}. Remove one of them.")
    file = _parse(path, problems)
    if file is None:
        return []
    files = []
    for name, node in file.root.value:
        if name.value != BASE_KEY:
            continue
        for base in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            target = path.parent / Path(str(base.value)).expanduser()
            if target.is_file():
                files += read_with_bases(target, problems, (*chain, path.resolve()))
            else:
                problems.append(f"{file.at(base)}: {BASE_KEY} {base.value}: no such file.")
    return [*files, file]


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the plain content of one file that has no bases, such as a suite."""
    problems: list[str] = []
    file = _parse(path, problems)
    raise_problems(problems, str(path))
    return {} if file is None else file.value(file.root)


def file_values(name: str | Path) -> dict[str, Any]:
    """Return every value that a config file and its bases set, by full key; the last one wins."""
    problems: list[str] = []
    values: dict[str, Any] = {}
    for file in read_with_bases(find_config(name), problems):
        values |= dict(leaves(file.value(file.root)))
    raise_problems(problems, str(name))
    return {key: value for key, value in values.items() if key != BASE_KEY}


def raise_problems(problems: Sequence[str], where: str) -> None:
    """Raise one ConfigError that lists every problem, or return if there are none."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "".join(f"\n  {number}. {text}" for number, text in enumerate(problems, 1))
        raise ConfigError(f"{count} in {where}:{lines}")


def _parse(path: Path, problems: list[str]) -> YamlFile | None:
    """Return the file's nodes, or None for an empty file."""
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if root is None:
        return None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: A config must be a mapping of keys to values.")
    file = YamlFile(path, root, loader)
    _check_keys(file, root, problems, set())
    return file


def _check_keys(file: YamlFile, node: yaml.Node, problems: list[str], seen: set[int]) -> None:
    """Report keys that appear twice in one mapping, at any depth, and merge `<<` into mappings."""
    if id(node) in seen or isinstance(node, yaml.ScalarNode):  # an alias may lead back to itself
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(file, item, problems, seen)
        return
    names = set()
    for name, value in node.value:
        if not isinstance(name, yaml.ScalarNode):
            raise ConfigError(f"{file.at(name)}: A key must be text.")
        if name.value in names:
            problems.append(f"{file.at(name)}: {name.value} appears twice in one mapping.")
        names.add(name.value)
        _check_keys(file, value, problems, seen)
    assert isinstance(node, yaml.MappingNode)
    try:
        file.loader.flatten_mapping(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file.at(node)}: {error}") from error
