"""Config trees: flatten, look up, hash, print and save."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from fvcore.common.config import CfgNode

from kscl.config.defaults import WITHOUT_EFFECT_ON_RESULTS
from kscl.runtime.files import write_atomically

CONFIG_FILE = "config.yaml"
PRINTED_WIDTH = 100


def plain(node: Any) -> Any:
    """Return a config, or any value of one, as plain dicts, lists and values."""
    if isinstance(node, dict):
        return {key: plain(value) for key, value in node.items()}
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
        for key, value in node.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def leaves_without(node: object, names: Iterable[str]) -> dict[str, Any]:
    """Return every leaf by its full key, leaving out those that `names` name or contain."""
    inside = tuple(f"{name}." for name in names)
    return {key: value for key, value in leaves(node) if not f"{key}.".startswith(inside)}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree whose leaves these are, by full key."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def value_at(cfg: CfgNode, key: str) -> Any:
    """Return the value of a full key; raise KeyError if there is none."""
    node: Any = cfg
    for part in key.split("."):
        if not isinstance(node, dict):
            raise KeyError(key)
        node = node[part]
    return node


def config_hash(cfg: CfgNode, without: Sequence[str] = WITHOUT_EFFECT_ON_RESULTS) -> str:
    """Return a hash that is equal for configs with equal results: where things lie has no part."""
    values = leaves_without(plain(cfg), without)
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def save_config(cfg: CfgNode, output_dir: str | Path) -> Path:
    """Write the resolved config beside the results of its run, and return its path."""
    path = Path(output_dir) / CONFIG_FILE
    write_atomically(path, config_yaml(cfg).encode())
    return path


def config_yaml(cfg: CfgNode, comments: Mapping[str, str] | None = None) -> str:
    """Return the whole config as YAML that can be fed back, one key per line.

    `comments` holds the sentences to print beside the keys (see `kscl.config.comments`).
    """
    return "".join(f"{line}\n" for line in _lines(config_values(cfg), comments or {}, "", ""))


def one_line(value: object) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, sort_keys=False)
    return text.strip().removesuffix("...").strip()


def _lines(
    values: Mapping[str, Any], comments: Mapping[str, str], prefix: str, indent: str
) -> Iterator[str]:
    for key, value in values.items():
        comment = comments.get(f"{prefix}{key}", "")
        name = f"{indent}{one_line(key)}:"
        if isinstance(value, dict) and value:
            yield from _commented(name, comment, indent)
            yield from _lines(value, comments, f"{prefix}{key}.", f"{indent}  ")
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            yield from _commented(name, comment, indent)
            yield from (f"{indent}  - {one_line(item)}" for item in value)
        else:
            yield from _commented(f"{name} {one_line(value)}", comment, indent)


def _commented(line: str, comment: str, indent: str) -> Iterator[str]:
    """Yield the line with its comment behind it, or above it if it is too long."""
    behind = f"{line}  # {comment}" if comment else line
    if comment and len(behind) > PRINTED_WIDTH:
        yield from textwrap.wrap(
            comment, PRINTED_WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        yield line
    else:
        yield behind
