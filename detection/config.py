"""Detection configs: Detectron2's own tree with one section of ours, read strictly and safely.

Detectron2 reads YAML with code execution allowed; here a file is data. A key that does not exist is
an error that names the nearest one, and all of a file's and the command line's are told at once.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from detectron2.config import CfgNode, get_cfg

from detection.errors import DetectionError
from kscl.config.merge import COMMAND_LINE, IN_WORDS, nearest_keys
from kscl.config.shipped import find_config

BASE_KEY = "_BASE_"
VERSION = 2
BATCH_NORMS = ("BN", "SyncBN", "nnSyncBN", "naiveSyncBN", "naiveSyncBN_N", "FrozenBN")
NORM_KEY = "MODEL.RESNETS.NORM"


def add_kscl_config(cfg: CfgNode) -> None:
    """Our section, as Detectron2's projects add theirs."""
    cfg.KSCL = CfgNode()
    # Rows of a leaderboard are ranked only within one protocol; this is its name.
    cfg.KSCL.PROTOCOL = ""
    # Processes that batch, rate and steps are written for; on another number they are scaled.
    # 0: they are taken as they stand. (Detectron2's REFERENCE_WORLD_SIZE, where set, goes first.)
    cfg.KSCL.NUM_GPUS = 0
    # Of MODEL.WEIGHTS; empty is certificate.json beside the weights.
    cfg.KSCL.CERTIFICATE = ""
    # Training from random weights (MODEL.WEIGHTS "") must be asked for by name.
    cfg.KSCL.FROM_SCRATCH = False
    # The class list, in order; empty is the training sets' own.
    cfg.KSCL.CLASS_NAMES = []
    # Whose AP is the headline, voc07-11pt or coco-101pt; every run is scored by both.
    cfg.KSCL.SCORER = "voc07-11pt"


def detection_defaults() -> CfgNode:
    cfg = get_cfg()
    add_kscl_config(cfg)
    return cfg


def load_detection_config(
    config_file: str | Path | None = None, overrides: Sequence[str] = ()
) -> CfgNode:
    """Detectron2's defaults, then the file and its `_BASE_`, then KEY VALUE; not frozen."""
    cfg = detection_defaults()
    problems: list[str] = []
    if config_file is not None:
        path = find_config(config_file)
        values = _read_with_bases(path, ())
        if values.get("VERSION", VERSION) != VERSION:
            problems.append(f"{path}: VERSION is {values['VERSION']}; Detectron2's is {VERSION}")
        for key, value in _leaves(values, cfg):
            problems += _set(cfg, key, value, str(path))
        _find_weights_beside(cfg, path)
    if len(overrides) % 2:
        problems.append(
            f"{COMMAND_LINE}: overrides are pairs KEY VALUE, and '{overrides[-1]}' is left over"
        )
    for key, text in zip(overrides[::2], overrides[1::2], strict=False):
        problems += _set(cfg, key, text, COMMAND_LINE)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "".join(f"\n  {number}. {text}" for number, text in enumerate(problems, 1))
        raise DetectionError(f"{count} in the detection config:{lines}")
    return cfg


def value_at(cfg: CfgNode, key: str) -> Any:
    """The value of a full key; KeyError where there is none."""
    node: Any = cfg
    for part in key.split("."):
        if not isinstance(node, CfgNode):
            raise KeyError(key)
        node = node[part]
    return node


def norm_family(norm: str) -> str:
    """Flavours of BatchNorm hold the same tensors; which one is used is the protocol's choice."""
    return "BN" if norm in BATCH_NORMS else norm


def set_network(cfg: CfgNode, keys: Mapping[str, Any]) -> None:
    """Make a protocol's config that of a given network; its flavour of BatchNorm stays."""
    for key, value in keys.items():
        if key == NORM_KEY and norm_family(value_at(cfg, key)) == norm_family(value):
            continue
        problems = _set(cfg, key, value, "the network")
        assert not problems, problems


def config_values(cfg: CfgNode, always: Iterable[str] = ()) -> dict[str, Any]:
    """What a file must say to give this config again: all that is not Detectron2's default.

    The keys in `always` stand there also where they are the default, for the reader.
    """
    values = _plain_differences(cfg, detection_defaults()) | {"VERSION": VERSION}
    for key in always:
        *sections, name = key.split(".")
        node = values
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = _plain(value_at(cfg, key))
    return values


def _plain_differences(node: CfgNode, default: CfgNode) -> dict[str, Any]:
    different: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, CfgNode) and isinstance(default.get(key), CfgNode):
            inner = _plain_differences(value, default[key])
            if inner:
                different[key] = inner
        elif key not in default or value != default[key]:
            different[key] = _plain(value)
    return different


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _set(cfg: CfgNode, key: str, value: Any, where: str) -> list[str]:
    """Set one key to a value of its type, or say why not."""
    try:
        default = value_at(cfg, key)
    except KeyError:
        nearest = nearest_keys(key, [name for name, _ in _leaves(cfg, cfg)])
        hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
        return [f"{where}: {key} is not a key of Detectron2's or ours{hint}"]
    if isinstance(default, CfgNode):
        return [f"{where}: {key} is a section with keys of its own: {', '.join(default)}"]
    section, _, name = key.rpartition(".")
    node = value_at(cfg, section) if section else cfg
    try:
        node[name] = _as_type_of(default, value)
    except TypeError as error:
        return [f"{where}: {key} takes {error}, not {value!r}"]
    return []


def _as_type_of(default: Any, value: Any) -> Any:
    """The value as Detectron2 would read it; TypeError says in words what is wanted."""
    if isinstance(default, str) and isinstance(value, str):
        return value
    if isinstance(value, str):
        value = _parsed(value)
    wanted = type(default)
    if default is None or type(value) is wanted:
        return value
    if wanted in (list, tuple) and isinstance(value, list | tuple):
        return wanted(value)
    if wanted is float and type(value) is int:
        return float(value)
    raise TypeError(IN_WORDS.get(wanted, "a list"))


def _parsed(text: str) -> Any:
    """Python's notation, as in Detectron2's files and commands, or YAML's for true and false."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False}.get(text.lower(), text)


def _read_with_bases(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in chain:
        names = " → ".join(p.name for p in (*chain, path))
        raise DetectionError(f"{path}: {BASE_KEY} goes round in a circle: {names}")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise DetectionError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise DetectionError(
            f"{path} is not plain YAML, and nothing is run from a config file: {error}"
        ) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise DetectionError(f"{path}: a config is a mapping of keys to values")
    bases = values.pop(BASE_KEY, [])
    merged: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        target = path.parent / Path(str(base)).expanduser()
        if not target.is_file():
            raise DetectionError(f"{path}: {BASE_KEY} {base}: no such file")
        _merge(_read_with_bases(target, (*chain, path.resolve())), merged)
    _merge(values, merged)
    return merged


class _StrictLoader(yaml.SafeLoader):
    """Plain data only, and a key that stands twice in one mapping is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [name.value for name, _ in node.value]
        twice = [name for index, name in enumerate(names) if name in names[:index]]
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"{twice[0]} stands twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


def _merge(values: Mapping[str, Any], into: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(value, into[key])
        else:
            into[key] = value


def _leaves(
    values: Mapping[str, Any], tree: CfgNode | None, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """(full key, value); a mapping is a section where the config's tree has one or has nothing."""
    for key, value in values.items():
        section = tree.get(key) if tree is not None else None
        if isinstance(value, dict) and (section is None or isinstance(section, CfgNode)):
            yield from _leaves(value, section, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _find_weights_beside(cfg: CfgNode, path: Path) -> None:
    """A converted folder can be moved: its config names the weights beside it."""
    weights = cfg.MODEL.WEIGHTS
    if weights and not Path(weights).is_file() and (path.parent / weights).is_file():
        cfg.MODEL.WEIGHTS = str(path.parent / weights)
