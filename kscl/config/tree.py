"""Config trees: flatten, look up, hash, print and save."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from fvcore.common.config import CfgNode

from kscl.config.defaults import WITHOUT_EFFECT_ON_RESULTS
from kscl.runtime.files import write_atomically

CONFIG_FILE = "config.yaml"


def config_values(cfg: CfgNode) -> dict[str, Any]:
    """The whole config as plain dicts, lists and values."""
    values = _plain(cfg)
    assert isinstance(values, dict)
    return values


def config_yaml(cfg: CfgNode) -> str:
    """The whole config as YAML that can be fed back."""
    return yaml.safe_dump(config_values(cfg), sort_keys=False, default_flow_style=None, width=100)


def save_config(cfg: CfgNode, output_dir: str | Path) -> Path:
    """Every run keeps its resolved config beside its results."""
    path = Path(output_dir) / CONFIG_FILE
    write_atomically(path, config_yaml(cfg).encode())
    return path


def config_hash(cfg: CfgNode, without: Sequence[str] = WITHOUT_EFFECT_ON_RESULTS) -> str:
    """Equal for configs that give the same results: where things lie does not count."""
    values = {
        key: value
        for key, value in leaves(_plain(cfg))
        if not any(key == name or key.startswith(f"{name}.") for name in without)
    }
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _plain(node: object) -> object:
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_plain(value) for value in node]
    return node


def leaves(node: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(full key, value) of every leaf; an empty free section is a leaf."""
    if isinstance(node, dict) and (node or not prefix):
        for key, value in node.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, node


def value_of(cfg: CfgNode, key: str) -> object:
    node = cfg
    for part in key.split("."):
        node = node[part]
    return node
