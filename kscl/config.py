"""Configs: declared keys, YAML files over their defaults, KEY VALUE overrides over those.

A key is declared once, with its default, its documentation and what values it takes:

    class SOLVER(Section):
        EPOCHS = key(200, "Passes over the images.", at_least=1)

Reading, checking, `--print-config`, hashes and docs/config.md all follow from that. The merge is
strict: an unknown key, a value of the wrong type and a value outside its range are errors, all
reported at once with where each came from and the nearest valid name.
"""

from __future__ import annotations

import ast
import copy
import difflib
import hashlib
import json
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from fvcore.common.config import BASE_KEY, CfgNode

from kscl.errors import ConfigError
from kscl.runtime.files import write_atomically
from kscl.runtime.machine import shipped_configs

CONFIG_FILE = "config.yaml"
COMMAND_LINE = "command line"
PRINTED_WIDTH = 100
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}

# A broken rule: the keys it concerns, and what is wrong with their values and how to fix it.
Broken = tuple[tuple[str, ...], str]
Rule = Callable[[CfgNode], Iterable[Broken]]

_MISSING = object()


# Declaring keys


@dataclass(frozen=True)
class Key:
    """A setting. The bounds of a list are those of each of its items."""

    default: Any
    doc: str = ""
    choices: Collection[str] = ()  # the only values
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    length: int = 0  # of a list; 0 is any
    distinct: bool = False  # a list of one or more different items
    rising: bool = False  # a list of one or more items, each larger than the one before
    optional: bool = False  # null is a value
    or_list: bool = False  # a list is a value as well; a rule looks at it
    named: Mapping[str, Any] = field(default_factory=dict)  # values that have a name
    any_key: bool = False  # a section that takes any key
    check: Callable[[Any], str | None] | None = None  # what is wrong with a value, or None
    effect: bool = True  # whether results depend on it: part of the config's hash

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a value of the right type, or None."""
        if self.optional and value is None:
            return None
        if self.check is not None and (problem := self.check(value)):
            return problem
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}"
        items = value if isinstance(value, list | tuple) else [value]
        inside = not self.range_text or all(self._is_inside(item) for item in items)
        return None if inside and self._is_shaped(items) else f"must be {self.allowed}"

    def _is_shaped(self, items: Sequence[Any]) -> bool:
        if self.length and len(items) != self.length:
            return False
        if self.rising and sorted(items) != list(items):
            return False
        different = len(items) > 0 and len({*map(repr, items)}) == len(items)
        return different or not (self.distinct or self.rising)

    def _is_inside(self, value: Any) -> bool:
        if not isinstance(value, int | float):
            return False
        return (  # NaN is in no range
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    @property
    def range_text(self) -> str:
        """Return the range of a number in words, or nothing."""
        low = self.at_least if self.at_least is not None else self.above
        high = self.at_most if self.at_most is not None else self.below
        if low is not None and high is not None:
            ends = "[" if self.at_least is not None else "(", "]" if self.below is None else ")"
            return f"in {ends[0]}{low:g}, {high:g}{ends[1]}"
        if low is not None:
            return f"{'at least' if self.above is None else 'greater than'} {low:g}"
        return "" if high is None else f"{'at most' if self.below is None else 'below'} {high:g}"

    @property
    def allowed(self) -> str:
        """Return the values it takes in words, for errors and docs/config.md."""
        if self.choices:
            quoted = [f"`{name}`" for name in self.choices]
            return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if quoted[1:] else quoted)
        shape = f"{self.length} numbers" if self.length else ""
        if self.rising:
            shape = "one or more rising numbers"
        elif self.distinct:
            shape = "one or more different numbers"
        return ", each ".join(part for part in (shape, self.range_text) if part)


def key(default: Any, doc: str, **limits: Any) -> Any:
    """Declare a key; see `Key` for its limits."""
    return Key(default, " ".join(doc.split()), **limits)


class Section:
    """The base of a section: its attributes are keys, and sections inside it."""


def _declared(declaration: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (full name, key or section) of a class and of the sections in it, in their order."""
    for base in reversed(declaration.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, Key):
                yield f"{prefix}{name}", value
            elif isinstance(value, type) and issubclass(value, Section):
                yield f"{prefix}{name}", value
                yield from _declared(value, f"{prefix}{name}.")


@dataclass(frozen=True)
class Schema:
    """The keys of a kind of config, the docs of its sections, and the rules between keys."""

    keys: Mapping[str, Key]
    docs: Mapping[str, str] = field(default_factory=dict)  # of sections
    rules: tuple[Rule, ...] = ()
    check_items: bool = True  # items of a list must have the type of those of the default
    make: Callable[[], CfgNode] | None = None  # the defaults, if another library has them

    @classmethod
    def of(cls, *declarations: type, rules: Sequence[Rule] = ()) -> Schema:
        """Return the schema of classes that declare keys."""
        found = [pair for declaration in declarations for pair in _declared(declaration)]
        keys = {name: one for name, one in found if isinstance(one, Key)}
        sections = [(name, one.__doc__ or "") for name, one in found if name not in keys]
        docs = {name: " ".join(doc.split()) for name, doc in sections if doc}
        return cls(keys, docs, tuple(rules))

    def defaults(self, node: type[CfgNode] = CfgNode) -> CfgNode:
        """Return a new tree with every key, of nodes of this type."""
        if self.make is not None:
            return self.make()
        tree = node(nested({name: declared.default for name, declared in self.keys.items()}))
        for name, declared in self.keys.items():
            if declared.any_key:
                value_at(tree, name).set_new_allowed(True)
        return tree

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Return the keys that say where or how, not what: results do not depend on them."""
        return tuple(name for name, declared in self.keys.items() if not declared.effect)

    def check(self, cfg: CfgNode) -> Iterator[Broken]:
        """Yield every broken rule, of keys alone and together."""
        for name, declared in self.keys.items():
            if problem := declared.problem(value_at(cfg, name)):
                yield (name,), problem
        for rule in self.rules:
            yield from rule(cfg)

    def load(self, config_file: str | Path | None = None, overrides: Sequence[str] = ()) -> CfgNode:
        """Return the merge of defaults, file and overrides, checked as a whole and frozen."""
        merge = _Merge(self, self.defaults())
        if config_file is not None:
            for file in read_with_bases(find_config(config_file), merge.problems):
                merge.mapping("", file.root, file)
        merge.overrides(list(overrides))
        merge.problems += [merge.describe(*broken) for broken in self.check(merge.cfg)]
        raise_problems(merge.problems, "the configuration")
        merge.cfg.freeze()
        return merge.cfg

    def print(self, cfg: CfgNode) -> str:
        """Return the config as YAML that can be fed back, with its documentation."""
        docs = {name: declared.doc for name, declared in self.keys.items()}
        return config_yaml(cfg, {**self.docs, **docs})

    def hash(self, cfg: CfgNode) -> str:
        """Return a hash that is equal for configs with equal results."""
        return config_hash(cfg, self.without_effect)


# Merging


@dataclass
class _Merge:
    """A config being merged: its values so far, where each came from, and all problems."""

    schema: Schema
    cfg: CfgNode
    problems: list[str] = field(default_factory=list)
    origin: dict[str, str] = field(default_factory=dict)

    def mapping(self, prefix: str, mapping: yaml.MappingNode, file: YamlFile) -> None:
        """Set all keys of a mapping, those of its sections too."""
        for name, node in mapping.value:
            full = f"{prefix}{name.value}"
            if full == BASE_KEY:
                continue
            if isinstance(node, yaml.MappingNode) and self.is_section(full, node):
                self.mapping(f"{full}.", node, file)
                continue
            try:
                self.set(full, file.value(node, full), file.at(name))
            except ConfigError as error:
                self.problems.append(str(error))

    def is_section(self, name: str, node: yaml.MappingNode) -> bool:
        """Return whether a mapping is a section; in an unknown one every key is reported."""
        known = self.get(name)
        if known is _MISSING:
            return bool(node.value) and not self.is_free(name)
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
        for name, text in zip(words[::2], words[1::2], strict=False):
            is_text = isinstance(self.get(name), str)
            self.set(name, text if is_text else parse_value(text), COMMAND_LINE)

    def get(self, name: str) -> Any:
        """Return the value of a key so far, or _MISSING."""
        try:
            return value_at(self.cfg, name)
        except KeyError:
            return _MISSING

    def is_free(self, name: str) -> bool:
        """Return whether a key is in a section that takes any key."""
        parent = self.get(name.rpartition(".")[0]) if "." in name else self.cfg
        return isinstance(parent, CfgNode) and parent.is_new_allowed()

    def set(self, name: str, value: Any, where: str) -> None:
        """Set one key to a value of its type, or report why not."""
        parent, _, last = name.rpartition(".")
        section = self.get(parent) if parent else self.cfg
        known = self.get(name)
        if self.is_free(name):
            section[last] = value
        elif isinstance(known, CfgNode):
            if known.is_new_allowed() and isinstance(value, dict):
                for child, child_value in value.items():
                    self.set(f"{name}.{child}", child_value, where)
                return
            keys = ", ".join(known) or "any name"
            self.problems.append(f"{where}: {name} is a section with keys of its own: {keys}.")
        elif known is _MISSING:
            self.problems.append(f"{where}: {self.unknown(name)}")
        else:
            try:
                section[last] = self.typed(self.schema.keys[name], known, value)
            except TypeError as error:
                self.problems.append(f"{where}: {name} takes {error}, not {value!r}.")
                return
        self.origin[name] = where

    def typed(self, declared: Key, known: Any, value: Any) -> Any:
        """Return the value as the type of the key, so far `known`, or the value that it names."""
        names, default = declared.named, declared.default
        if isinstance(value, str) and value in names:
            return copy.deepcopy(names[value])
        if isinstance(value, str) and not isinstance(default, str):
            value = parse_value(value)
        if declared.or_list and isinstance(value, list | tuple):
            return copy.deepcopy(list(value))
        if declared.optional and value is None:
            return None
        try:
            wanted = default
            if default is None:
                wanted = [] if declared.optional else known
            return as_type_of(wanted, value, self.schema.check_items)
        except TypeError as error:
            choice = f" or one of {', '.join(names)}" if names else ""
            raise TypeError(f"{error}{choice}") from None

    def unknown(self, name: str) -> str:
        """Return the problem of a key that does not exist, with what it may be meant to be."""
        valid = [full for full, _ in leaves(self.cfg)]
        by_upper = {each.upper(): each for each in (valid if "." in name else [*valid, *self.cfg])}
        last = name.upper().rpartition(".")[2]
        same_name = [upper for upper in by_upper if upper.rpartition(".")[2] == last]
        close = difflib.get_close_matches(name.upper(), by_upper, n=3, cutoff=0.6)
        nearest = [by_upper[upper] for upper in dict.fromkeys([*same_name, *close])][:3]
        hint = f"; did you mean {' or '.join(nearest)}?" if nearest else "."
        return f"{name} is not a key{hint}"

    def describe(self, names: tuple[str, ...], text: str) -> str:
        """Return a broken rule with the values it concerns and where they came from."""
        values = ", ".join(
            f"{name} is {value_at(self.cfg, name)!r} ({self.origin.get(name, 'default')})"
            for name in names
        )
        text = f"{values}: {text}" if values else text
        return text if text.endswith((".", "?", "!")) else f"{text}."


def as_type_of(default: Any, value: Any, check_items: bool = False) -> Any:
    """Return the value as the default's type; TypeError says in words what is wanted."""
    if isinstance(value, str) and not isinstance(default, str):
        value = parse_value(value)
    if default is None:
        return value
    wanted = type(default)
    if isinstance(default, list | tuple):
        if not isinstance(value, list | tuple):
            raise TypeError("a list")
        kinds = {type(item) for item in default}
        if check_items and len(kinds) == 1 and kinds <= set(TYPE_NAMES):
            value = [as_type_of(default[0], item) for item in value]
        if kinds == {tuple}:  # of tuples, which are lists to YAML
            value = [tuple(item) if isinstance(item, list) else item for item in value]
        return wanted(value)
    if isinstance(value, bool) is not (wanted is bool):
        raise TypeError(TYPE_NAMES[wanted])
    if wanted is float and isinstance(value, int | str):  # "nan" and "inf" are text to YAML
        try:
            return float(value)
        except ValueError:
            raise TypeError(TYPE_NAMES[float]) from None
    if not isinstance(value, wanted):
        raise TypeError(TYPE_NAMES[wanted])
    return value


def parse_value(text: str) -> Any:
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


# Reading YAML files: plain data only, every key once, and the files of `_BASE_` first


def find_config(name: str | Path) -> Path:
    """Return the path as it is, or else that of the shipped config of this name."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    parts = path.parts[1:] if path.parts[:1] == ("configs",) else path.parts
    shipped = shipped_configs().joinpath(*parts)
    if shipped.is_file():
        return shipped
    names = [p.relative_to(shipped_configs()).as_posix() for p in shipped_configs().rglob("*.yaml")]
    nearest = difflib.get_close_matches("/".join(parts), names, n=3, cutoff=0.4)
    raise ConfigError(
        f"{name}: no such config file, here or among those shipped."
        + (f" The nearest shipped ones are {', '.join(nearest)}." if nearest else "")
    )


@dataclass(frozen=True)
class YamlFile:
    """One file as a tree of YAML nodes, which know their line numbers."""

    path: Path
    root: yaml.MappingNode
    loader: yaml.SafeLoader

    def at(self, node: yaml.Node) -> str:
        """Return where a node is, as `file:line`."""
        return f"{self.path}:{node.start_mark.line + 1}"

    def value(self, node: yaml.Node, name: str = "") -> Any:
        """Return the plain value of a node; raise ConfigError for a tag that would run code."""
        try:
            return self.loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
            mark = getattr(error, "problem_mark", None) or node.start_mark
            raise ConfigError(
                f"{self.path}:{mark.line + 1}: {name}{': ' if name else ''}"
                f"{getattr(error, 'problem', error)}. Nothing is run from a config file: write "
                "the value itself."
            ) from error


def read_with_bases(
    path: Path, problems: list[str], chain: tuple[Path, ...] = ()
) -> list[YamlFile]:
    """Return the files that a config consists of, bases first; add what is wrong to `problems`."""
    if path.resolve() in chain:
        names = " → ".join(file.name for file in (*chain, path))
        raise ConfigError(f"{path}: {BASE_KEY} forms a circle: {names}. Remove one of them.")
    file = _parse_file(path, problems)
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
    file = _parse_file(path, problems)
    raise_problems(problems, str(path))
    return {} if file is None else file.value(file.root)


def file_values(name: str | Path) -> dict[str, Any]:
    """Return every value that a config file and its bases set, by full key; the last one wins."""
    problems: list[str] = []
    values: dict[str, Any] = {}
    for file in read_with_bases(find_config(name), problems):
        values |= dict(leaves(file.value(file.root)))
    raise_problems(problems, str(name))
    return {full: value for full, value in values.items() if full != BASE_KEY}


def raise_problems(problems: Sequence[str], where: str) -> None:
    """Raise one ConfigError that lists every problem, or return if there are none."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "".join(f"\n  {number}. {text}" for number, text in enumerate(problems, 1))
        raise ConfigError(f"{count} in {where}:{lines}")


def _parse_file(path: Path, problems: list[str]) -> YamlFile | None:
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
    _check_names(file, root, problems, set())
    return file


def _check_names(file: YamlFile, node: yaml.Node, problems: list[str], seen: set[int]) -> None:
    """Report keys that appear twice in one mapping, at any depth, and merge `<<` into mappings."""
    if id(node) in seen or isinstance(node, yaml.ScalarNode):  # an alias may lead back to itself
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_names(file, item, problems, seen)
        return
    names = set()
    for name, value in node.value:
        if not isinstance(name, yaml.ScalarNode):
            raise ConfigError(f"{file.at(name)}: A key must be text.")
        if name.value in names:
            problems.append(f"{file.at(name)}: {name.value} appears twice in one mapping.")
        names.add(name.value)
        _check_names(file, value, problems, seen)
    assert isinstance(node, yaml.MappingNode)
    try:
        file.loader.flatten_mapping(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file.at(node)}: {error}") from error


# Config trees: flatten, look up, hash, print and save


def plain(node: Any) -> Any:
    """Return a config, or any value of one, as plain dicts, lists and values."""
    if isinstance(node, dict):
        return {name: plain(value) for name, value in node.items()}
    if isinstance(node, list | tuple):
        return [plain(value) for value in node]
    return node


def config_values(cfg: CfgNode) -> dict[str, Any]:
    """Return the whole config as nested plain dicts."""
    values = plain(cfg)
    assert isinstance(values, dict)
    return values


def leaves(node: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (full key, value) of every leaf; an empty section is a leaf."""
    if isinstance(node, dict) and (node or not prefix):
        for name, value in node.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, node


def leaves_without(node: object, names: Iterable[str]) -> dict[str, Any]:
    """Return every leaf by its full key, leaving out those that `names` name or contain."""
    inside = tuple(f"{name}." for name in names)
    return {name: value for name, value in leaves(node) if not f"{name}.".startswith(inside)}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree whose leaves these are, by full key."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return tree


def value_at(cfg: CfgNode, name: str) -> Any:
    """Return the value of a full key; raise KeyError if there is none."""
    node: Any = cfg
    for part in name.split("."):
        if not isinstance(node, dict):
            raise KeyError(name)
        node = node[part]
    return node


def config_hash(cfg: CfgNode, without: Sequence[str]) -> str:
    """Return a hash of all values but those of the keys or sections in `without`."""
    values = leaves_without(plain(cfg), without)
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def save_config(cfg: CfgNode, output_dir: str | Path) -> Path:
    """Write the resolved config beside the results of its run, and return its path."""
    path = Path(output_dir) / CONFIG_FILE
    write_atomically(path, config_yaml(cfg).encode())
    return path


def config_yaml(cfg: CfgNode, docs: Mapping[str, str] | None = None) -> str:
    """Return the whole config as YAML that can be fed back, one key per line.

    `docs` holds the sentences to print beside the keys.
    """
    return "".join(f"{line}\n" for line in _lines(config_values(cfg), docs or {}))


def one_line(value: object) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, sort_keys=False)
    return text.strip().removesuffix("...").strip()


def _lines(
    values: Mapping[str, Any], docs: Mapping[str, str], prefix: str = "", indent: str = ""
) -> Iterator[str]:
    """Yield the lines of a mapping, with a comment behind its line, or above it if it is long."""
    for name, value in values.items():
        line = f"{indent}{one_line(name)}:"
        below: Iterable[str] = ()
        if isinstance(value, dict) and value:
            below = _lines(value, docs, f"{prefix}{name}.", f"{indent}  ")
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            below = (f"{indent}  - {one_line(item)}" for item in value)
        else:
            line += f" {one_line(value)}"
        comment = docs.get(f"{prefix}{name}", "")
        if comment and len(f"{line}  # {comment}") > PRINTED_WIDTH:
            above = f"{indent}# "
            yield from textwrap.wrap(
                comment, PRINTED_WIDTH, initial_indent=above, subsequent_indent=above
            )
        elif comment:
            line += f"  # {comment}"
        yield line
        yield from below
