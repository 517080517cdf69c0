"""What a suite file may say; every mistake in it is told at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kscl.config.shipped import find_config
from kscl.errors import ConfigError, KsclError

Overrides = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """Where a backbone comes from: a pretraining config, a file, or random weights."""

    name: str
    pretrain: str = ""  # a config file
    file: str = ""  # somebody's weights
    arch: str = ""  # of a file that does not say it, or of random weights
    kwargs: dict[str, Any] = field(default_factory=dict)
    overrides: Overrides = field(default_factory=dict)
    seeds: tuple[int, ...] = ()  # the suite's, unless it has its own


@dataclass(frozen=True)
class Evaluation:
    """One way of measuring every contender."""

    kind: str  # "linear", "knn" or "detection"
    config: str
    trials: int = 1  # fine-tuning trials a backbone; detection only
    overrides: Overrides = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    name: str
    output_dir: str
    contenders: tuple[Contender, ...]
    evaluations: tuple[Evaluation, ...]
    seeds: tuple[int, ...] = (0,)
    num_gpus: int = 1
    jobs: int = 1  # stages that run side by side
    shapes: dict[str, Any] = field(default_factory=dict)  # arguments of make_shapes, if it is used
    pretrain_overrides: Overrides = field(default_factory=dict)  # of every pretraining
    basis_image: str = ""  # drawn into the page for pretrained contenders
    board: str = "leaderboard"  # its folder; suites may share all the others
    baseline: tuple[str, ...] = ()  # methods that the board shows every row's difference to


SUITE_KEYS = {
    "name": str,
    "output_dir": str,
    "seeds": list,
    "num_gpus": int,
    "jobs": int,
    "shapes": dict,
    "pretrain_overrides": dict,
    "basis_image": str,
    "board": str,
    "baseline": list,
    "contenders": dict,
    "evaluations": dict,
}
CONTENDER_KEYS = {
    "pretrain": str,
    "file": str,
    "arch": str,
    "kwargs": dict,
    "overrides": dict,
    "seeds": list,
}
EVALUATION_KEYS = {"config": str, "trials": int, "overrides": dict}
EVALUATION_KINDS = ("linear", "knn", "detection")


def read_suite(name: str | Path) -> Suite:
    """The suite in this file, or a shipped one; or an error with everything that is wrong in it."""
    path = find_config(name)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise KsclError(f"{path} cannot be read as a suite: {error}") from error
    problems = list(_problems(values))
    if problems:
        lines = "\n".join(f"  {i}. {text}" for i, text in enumerate(problems, 1))
        raise KsclError(f"{path} is not a suite that can run:\n{lines}")
    seeds = tuple(values.get("seeds", [0]))
    contenders = (
        Contender(label, **(about | {"seeds": tuple(about.get("seeds", seeds))}))
        for label, about in values["contenders"].items()
    )
    plain = {k: v for k, v in values.items() if k not in ("contenders", "evaluations", "seeds")}
    return Suite(
        contenders=tuple(contenders),
        evaluations=tuple(Evaluation(k, **v) for k, v in values["evaluations"].items()),
        seeds=seeds,
        **plain,
    )


def _problems(values: object) -> Iterator[str]:
    if not isinstance(values, dict):
        yield "a suite is a mapping with name, output_dir, contenders and evaluations"
        return
    yield from _keys("the suite", values, SUITE_KEYS)
    for key in ("name", "output_dir", "contenders", "evaluations"):
        if not values.get(key):
            yield f"{key} is missing or empty"
    yield from _seeds("the suite", values)
    for label, about in _mapping(values, "contenders").items():
        yield from _contender(f"contender {label}", about)
    for kind, about in _mapping(values, "evaluations").items():
        if kind not in EVALUATION_KINDS:
            yield f"there is no evaluation '{kind}'; choose from {', '.join(EVALUATION_KINDS)}"
            continue
        if not isinstance(about, dict):
            yield f"evaluation {kind}: a mapping with a config"
            continue
        yield from _keys(f"evaluation {kind}", about, EVALUATION_KEYS)
        yield from _config(f"evaluation {kind}", about, "config")
        if isinstance(about.get("trials", 1), int) and about.get("trials", 1) < 1:
            yield f"evaluation {kind}: trials is {about['trials']}, at least 1"


def _contender(where: str, about: object) -> Iterator[str]:
    if not isinstance(about, dict):
        yield f"{where}: a mapping with pretrain, file or arch"
        return
    yield from _keys(where, about, CONTENDER_KEYS)
    yield from _seeds(where, about)
    if "pretrain" in about:
        yield from _config(where, about, "pretrain")
        if "file" in about or "arch" in about or "kwargs" in about:
            yield f"{where}: a pretraining config says what the network is; leave file and arch out"
    elif "file" in about:
        if isinstance(about["file"], str) and not Path(about["file"]).is_file():
            yield f"{where}: file {about['file']}: no such file"
    elif "arch" not in about:
        yield f"{where}: where is the backbone from? pretrain, file, or arch (random weights)"


def _keys(where: str, about: Mapping[str, Any], known: Mapping[str, type]) -> Iterator[str]:
    for key, value in about.items():
        if key not in known:
            nearest = difflib.get_close_matches(str(key), list(known), n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"choose from {', '.join(known)}"
            yield f"{where}: there is no key '{key}'; {hint}"
        elif not isinstance(value, known[key]) or isinstance(value, bool):
            yield f"{where}: {key} takes a {known[key].__name__}, not {value!r}"


def _config(where: str, about: Mapping[str, Any], key: str) -> Iterator[str]:
    try:
        find_config(about.get(key, ""))
    except ConfigError as error:
        yield f"{where}: {key}: {error}"


def _seeds(where: str, about: Mapping[str, Any]) -> Iterator[str]:
    seeds = about.get("seeds", [0])
    good = isinstance(seeds, list) and seeds and all(type(s) is int and s >= 0 for s in seeds)
    if not good or len(set(seeds)) != len(seeds):
        yield f"{where}: seeds is {seeds!r}, not a list of different whole numbers"


def _mapping(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}
