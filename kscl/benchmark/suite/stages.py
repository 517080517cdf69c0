"""From a suite to its stages: plain commands, each keyed by the hash of what goes into it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kscl.benchmark.suite.spec import Contender, Evaluation, Overrides, Suite
from kscl.config.shipped import find_config
from kscl.records.fingerprint import fingerprint
from kscl.runtime.files import sha256_of

KEY_LENGTH = 8
PATH_KEYS = ("DATA.TRAIN", "DATA.VAL", "EVAL.KNN_TRAIN", "EVAL.KNN_VAL")


@dataclass(frozen=True)
class Stage:
    """A command, the stages it waits for, and a key that changes when its result would."""

    name: str  # "kscl/seed0/pretrain"
    kind: str  # "shapes", "pretrain", "linear", "knn", "convert", "detection", "basis" or "board"
    program: str  # the console command
    arguments: tuple[str, ...]
    needs: tuple[Stage, ...]
    key: str
    folder: str  # where its results go

    @property
    def command(self) -> tuple[str, ...]:
        return (self.program, *self.arguments)


def plan(suite: Suite) -> list[Stage]:
    """Every stage in an order in which each comes after those it needs."""
    data = [_shapes(suite)] if suite.shapes else []
    stages = list(data)
    shown: list[Stage] = []  # whose folders the leaderboard reads
    for contender in suite.contenders:
        for seed in contender.seeds:
            made = list(_contender_stages(suite, contender, seed, data))
            stages += made
            shown += [stage for stage in made if stage.kind not in ("convert", "basis")]
    stages.append(_board(suite, shown, [stage for stage in stages if stage.kind == "basis"]))
    return stages


def _contender_stages(
    suite: Suite, contender: Contender, seed: int, data: list[Stage]
) -> Iterator[Stage]:
    place = f"{contender.name}/seed{seed}"
    pretrain = None
    if contender.pretrain:
        pretrain = _pretrain(suite, contender, seed, place, data)
        yield pretrain
        if suite.basis_image:
            yield _basis(suite, place, pretrain)
    for evaluation in suite.evaluations:
        if evaluation.kind == "detection":
            convert = _convert(suite, contender, seed, place, evaluation, pretrain)
            yield convert
            yield _detect(suite, seed, place, evaluation, [*data, convert], convert)
        else:
            yield _probe(suite, contender, seed, place, evaluation, data, pretrain)


def _shapes(suite: Suite) -> Stage:
    arguments: list[str] = []
    for name, value in suite.shapes.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    folder = str(suite.shapes.get("output_dir", "datasets/shapes"))
    return _stage("shapes", "shapes", "kscl-make-shapes", arguments, [], folder, [])


def _pretrain(
    suite: Suite, contender: Contender, seed: int, place: str, data: list[Stage]
) -> Stage:
    overrides = {**suite.pretrain_overrides, **contender.overrides, "SEED": seed}
    arguments = ["--config-file", contender.pretrain, "--auto-resume", *_gpus(suite)]
    return _in_folder(
        suite, f"{place}/pretrain", "pretrain", "kscl-pretrain", arguments, overrides, data,
        [contender.pretrain],
    )  # fmt: skip


def _basis(suite: Suite, place: str, pretrain: Stage) -> Stage:
    output = f"{pretrain.folder}/basis.png"
    arguments = ["--checkpoint", pretrain.folder, "--image", suite.basis_image]
    arguments += ["--output", output]
    name = f"{place}/basis"
    return _stage(name, "basis", "kscl-visualize-basis", arguments, [pretrain], output, [])


def _probe(
    suite: Suite,
    contender: Contender,
    seed: int,
    place: str,
    evaluation: Evaluation,
    data: list[Stage],
    pretrain: Stage | None,
) -> Stage:
    overrides = {**evaluation.overrides, "LABEL": contender.name, "SEED": seed}
    overrides |= _backbone_overrides(contender, pretrain)
    arguments = ["--config-file", evaluation.config, "--auto-resume", *_gpus(suite)]
    needs = data + ([pretrain] if pretrain else [])
    files = [evaluation.config, *([contender.file] if contender.file else [])]
    name = f"{place}/{evaluation.kind}"
    return _in_folder(
        suite, name, evaluation.kind, "kscl-linear-eval", arguments, overrides, needs, files
    )


def _backbone_overrides(contender: Contender, pretrain: Stage | None) -> Overrides:
    if pretrain is not None:
        return {"BACKBONE.WEIGHTS": f"{pretrain.folder}/backbone.safetensors"}
    weights = contender.file or "random"
    found: Overrides = {"BACKBONE.WEIGHTS": weights}
    if contender.arch:
        found["BACKBONE.NAME"] = contender.arch
    return found | {f"BACKBONE.KWARGS.{key}": value for key, value in contender.kwargs.items()}


def _convert(
    suite: Suite,
    contender: Contender,
    seed: int,
    place: str,
    evaluation: Evaluation,
    pretrain: Stage | None,
) -> Stage:
    if pretrain is not None:
        source = [f"{pretrain.folder}/backbone.safetensors"]
    else:
        source = [contender.file or "random"]
        if contender.arch:
            source += ["--arch", contender.arch, "--arch-kwargs", _as_yaml(contender.kwargs)]
        if not contender.file:
            source += ["--seed", str(seed)]
    arguments = [*source, "--protocol", evaluation.config]
    files = [evaluation.config, *([contender.file] if contender.file else [])]
    needs = [pretrain] if pretrain else []
    name = f"{place}/convert"
    key = _key("kscl-convert", arguments, needs, files)
    folder = f"{suite.output_dir}/{name}-{key[:KEY_LENGTH]}"
    arguments = [*arguments, "--output-dir", folder]
    return Stage(name, "convert", "kscl-convert", tuple(arguments), tuple(needs), key, folder)


def _detect(
    suite: Suite,
    seed: int,
    place: str,
    evaluation: Evaluation,
    needs: list[Stage],
    convert: Stage,
) -> Stage:
    overrides = {**evaluation.overrides, "SEED": seed * evaluation.trials}
    arguments = ["--config-file", f"{convert.folder}/config.yaml", "--auto-resume", *_gpus(suite)]
    arguments += ["--num-trials", str(evaluation.trials)]
    name = f"{place}/detection"
    return _in_folder(suite, name, "detection", "kscl-train-net", arguments, overrides, needs, [])


def _board(suite: Suite, shown: list[Stage], figures: list[Stage]) -> Stage:
    folder = f"{suite.output_dir}/{suite.board}"
    arguments = [stage.folder for stage in shown]
    arguments += ["--output-dir", folder, "--title", suite.name]
    arguments += [word for method in suite.baseline for word in ("--baseline", method)]
    return _stage(
        "leaderboard", "board", "kscl-leaderboard", arguments, [*shown, *figures], folder, []
    )


def _in_folder(
    suite: Suite,
    name: str,
    kind: str,
    program: str,
    arguments: list[str],
    overrides: Overrides,
    needs: list[Stage],
    files: list[str],
) -> Stage:
    """A stage whose OUTPUT_DIR carries its key, so that a changed one never meets an old one."""
    words = [*arguments, *_words(overrides)]
    hashed = [*files, *(str(overrides[key]) for key in PATH_KEYS if overrides.get(key))]
    key = _key(program, words, needs, hashed)
    folder = f"{suite.output_dir}/{name}-{key[:KEY_LENGTH]}"
    words += ["OUTPUT_DIR", folder]
    return Stage(name, kind, program, tuple(words), tuple(needs), key, folder)


def _stage(
    name: str,
    kind: str,
    program: str,
    arguments: list[str],
    needs: list[Stage],
    folder: str,
    files: list[str],
) -> Stage:
    key = _key(program, arguments, needs, files)
    return Stage(name, kind, program, tuple(arguments), tuple(needs), key, folder)


def _key(program: str, arguments: list[str], needs: list[Stage], files: list[str]) -> str:
    """Of the command, the stages before it, and the contents of the files and data it reads.

    Data that a stage before it makes is known by that stage's key. The code is no part of it: a
    result of older code is kept, and the leaderboard marks it as stale.
    """
    content = {
        "program": program,
        "arguments": arguments,
        "needs": [stage.key for stage in needs],
        "files": [_content(file, needs) for file in files],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _content(name: str, needs: list[Stage]) -> str:
    path = Path(name)
    made_here = any(path.is_relative_to(stage.folder) for stage in needs)
    if made_here:
        return name
    if path.suffix in (".yaml", ".yml"):
        return _config_content(find_config(name))
    if path.is_dir():
        return fingerprint(path).hash
    return sha256_of(path) if path.is_file() else name


def _config_content(path: Path) -> str:
    """Of a config file and of all that it inherits from."""
    digest = hashlib.sha256(path.read_bytes())
    values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    bases = values.get("_BASE_", []) if isinstance(values, dict) else []
    for base in [bases] if isinstance(bases, str) else bases:
        digest.update(_config_content(path.parent / Path(str(base)).expanduser()).encode())
    return digest.hexdigest()


def _gpus(suite: Suite) -> list[str]:
    return ["--num-gpus", str(suite.num_gpus)]


def _words(overrides: Overrides) -> list[str]:
    return [word for key, value in overrides.items() for word in (key, _as_yaml(value))]


def _as_yaml(value: Any) -> str:
    if isinstance(value, str):
        return value
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9).strip()
    return text.removesuffix("...").strip()
