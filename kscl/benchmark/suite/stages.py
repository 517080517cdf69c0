"""Plan the stages of a suite: plain commands, each keyed by the hash of what goes into it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kscl.benchmark.suite.inputs import content_of, data_of, weights_of
from kscl.benchmark.suite.references import SHAPES_FOLDER
from kscl.benchmark.suite.spec import Contender, Evaluation, Overrides, Suite, override_words
from kscl.cli import INSERT_OPTION
from kscl.config import one_line

KEY_LENGTH = 8


@dataclass(frozen=True)
class Stage:
    """A command, the stages it waits for, and a key that changes when its result would."""

    name: str  # "kscl/seed0/pretrain"
    kind: str  # "shapes", "pretrain", "convert", "basis", "board", or that of an evaluation
    program: str  # the console command
    arguments: tuple[str, ...]
    needs: tuple[Stage, ...]
    key: str
    folder: str  # where its results go
    length: int = 1  # of a pretraining: in units of the suite's steps

    @property
    def command(self) -> tuple[str, ...]:
        """Return the program and its arguments."""
        return (self.program, *self.arguments)


def plan(suite: Suite) -> list[Stage]:
    """Return every stage, each after those it needs."""
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
    run = f"{contender.name}/seed{seed}"
    pretrain = None
    if contender.pretrain:
        pretrain = _pretrain(suite, contender, seed, run, data)
        yield pretrain
        if suite.basis_image:
            yield _basis(suite, run, pretrain)
    for evaluation in suite.evaluations:
        if evaluation.kind == "detection":
            convert = _convert(suite, contender, seed, run, evaluation, pretrain)
            yield convert
            label = contender.label if pretrain is None else ""
            yield _detect(suite, seed, run, evaluation, [*data, convert], convert, label)
        else:
            yield _probe(suite, contender, seed, run, evaluation, data, pretrain)


def _shapes(suite: Suite) -> Stage:
    arguments: list[str] = []
    for name, value in suite.shapes.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    folder = str(suite.shapes.get("output_dir", SHAPES_FOLDER))
    return _stage("shapes", "shapes", "kscl-make-shapes", arguments, [], folder, [])


def _pretrain(suite: Suite, contender: Contender, seed: int, run: str, data: list[Stage]) -> Stage:
    overrides = {**suite.pretrain_overrides, **contender.overrides}
    overrides |= {"LABEL": contender.label, "SEED": seed}
    arguments = ["--config-file", contender.pretrain, "--auto-resume", *_gpus(suite.num_gpus)]
    stage = _in_folder(
        suite, f"{run}/pretrain", "pretrain", "kscl-pretrain", arguments, overrides, data,
        [contender.pretrain, *weights_of([contender.pretrain], overrides)],
    )  # fmt: skip
    return replace(stage, length=contender.lengths[0])


def _basis(suite: Suite, run: str, pretrain: Stage) -> Stage:
    output = f"{pretrain.folder}/basis.png"
    arguments = ["--checkpoint", pretrain.folder, "--image", suite.basis_image]
    arguments += ["--output", output]
    name, files = f"{run}/basis", [suite.basis_image]
    return _stage(name, "basis", "kscl-visualize-basis", arguments, [pretrain], output, files)


def _probe(
    suite: Suite,
    contender: Contender,
    seed: int,
    run: str,
    evaluation: Evaluation,
    data: list[Stage],
    pretrain: Stage | None,
) -> Stage:
    overrides = {"LABEL": contender.label, **evaluation.overrides, "SEED": seed}
    overrides |= _backbone_overrides(contender, pretrain)
    gpus = _gpus(evaluation.num_gpus or suite.num_gpus)
    arguments = ["--config-file", evaluation.config, "--auto-resume", *gpus]
    needs = data + ([pretrain] if pretrain else [])
    files = [evaluation.config, *([contender.file] if contender.file else [])]
    name = f"{run}/{evaluation.name}"
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
    for key, name in (("container", "BACKBONE.CONTAINER"), ("prefix", "BACKBONE.PREFIX")):
        if value := getattr(contender, key):
            found[name] = value
    if contender.mean:
        found |= {"INPUT.MEAN": list(contender.mean), "INPUT.STD": list(contender.std)}
    return found | {f"BACKBONE.KWARGS.{key}": value for key, value in contender.kwargs.items()}


def _convert(
    suite: Suite,
    contender: Contender,
    seed: int,
    run: str,
    evaluation: Evaluation,
    pretrain: Stage | None,
) -> Stage:
    if pretrain is not None:
        source = [f"{pretrain.folder}/backbone.safetensors"]
    else:
        source = [contender.file or "random"]
        if contender.arch:
            source += ["--arch", contender.arch, "--arch-kwargs", one_line(contender.kwargs)]
        for key in ("container", "prefix"):
            if value := getattr(contender, key):
                source += [f"--{key}", value]
        for key in ("mean", "std"):
            if values := getattr(contender, key):
                source += [f"--{key}", *map(str, values)]
        if not contender.file:
            source += ["--seed", str(seed)]
    arguments = [*source, "--protocol", evaluation.config]
    files = [evaluation.config, *([contender.file] if contender.file else [])]
    needs = [pretrain] if pretrain else []
    named_by_kind = evaluation.name == evaluation.kind
    name = f"{run}/convert" if named_by_kind else f"{run}/{evaluation.name}-convert"
    key = _key("kscl-convert", arguments, needs, files)
    folder = f"{suite.output_dir}/{name}-{key[:KEY_LENGTH]}"
    arguments = [*arguments, "--output-dir", folder]
    return Stage(name, "convert", "kscl-convert", tuple(arguments), tuple(needs), key, folder)


def _detect(
    suite: Suite,
    seed: int,
    run: str,
    evaluation: Evaluation,
    needs: list[Stage],
    convert: Stage,
    label: str,
) -> Stage:
    overrides = {**evaluation.overrides, "SEED": seed * evaluation.trials}
    if label not in ("", "random"):  # what the weights do not say themselves
        overrides = {"KSCL.LABEL": label, **overrides}
    arguments = ["--config-file", f"{convert.folder}/config.yaml", "--auto-resume"]
    arguments += _gpus(evaluation.num_gpus or suite.num_gpus)
    arguments += ["--num-trials", str(evaluation.trials)]
    name = f"{run}/{evaluation.name}"
    files = [evaluation.config]
    return _in_folder(
        suite, name, "detection", "kscl-train-net", arguments, overrides, needs, files
    )


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
    """Return a stage whose OUTPUT_DIR holds its key: a changed stage gets another folder."""
    words = [*arguments, *override_words(overrides)]
    hashed = [*files, *data_of(files, overrides)]
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
    """Return the hash of a command, the stages before it, and the files and data it reads.

    Data that an earlier stage makes is known by the key of that stage. The code is not part of it:
    a result of older code is kept, and the leaderboard marks it as stale.
    """
    made = _folders(needs)
    content = {
        "program": program,
        "arguments": arguments,
        "needs": [stage.key for stage in needs],
        "files": [content_of(file, made) for file in files],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _folders(stages: Sequence[Stage]) -> list[str]:
    """Return what these stages make, and those before them."""
    return [folder for stage in stages for folder in (stage.folder, *_folders(stage.needs))]


def _gpus(number: int) -> list[str]:
    return ["--num-gpus", str(number)]


def without_insert(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Keep a board that lacks results out of a document that may have had all of them."""
    if INSERT_OPTION not in arguments:
        return arguments
    place = arguments.index(INSERT_OPTION)
    return arguments[:place] + arguments[place + 3 :]  # a file and a name follow
