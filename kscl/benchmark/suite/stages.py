"""Plan a suite: its stages as objects, each keyed by the hash of what goes into it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kscl.benchmark.suite.spec import (
    RANDOM,
    SHAPES_FOLDER,
    Contender,
    Evaluation,
    Overrides,
    Suite,
    override_words,
)
from kscl.config import file_values, leaves, one_line
from kscl.data.annotations import is_set_name, parse_source
from kscl.data.source import is_remote
from kscl.data.tar import expand_shards, is_shard_pattern
from kscl.errors import KsclError
from kscl.records.fingerprint import fingerprint, fingerprint_of_list
from kscl.run.task import PRETRAIN, Command, commands
from kscl.runtime.files import sha256_of

KEY_LENGTH = 8
BACKBONE_FILE = "backbone.safetensors"
PATH_KEYS = (
    *("DATA.TRAIN", "DATA.VAL", "EVAL.KNN_TRAIN", "EVAL.KNN_VAL"),
    *("DATA.SUBSET", "DATASETS.TRAIN", "DATASETS.TEST"),
)
SETS, PARTS = "SETS.", (".train", ".val", ".test")  # of the linear suite
PHOTOS = "JPEGImages"  # of a set of prepare_data.py, which cuts them into a folder of tiles


@dataclass(frozen=True)
class Stage:
    """One run of a tool: what it is given, what it waits for, and where its result goes.

    The key changes when the result would.
    """

    name: str  # "kscl/seed0/pretrain"
    kind: str  # "shapes", "pretrain", "convert", "basis", "board", or that of an evaluation
    tool: str  # the module of its command
    folder: str  # where its results go
    needs: tuple[Stage, ...] = ()
    inputs: tuple[str, ...] = ()  # what it works on: a backbone, or the folders of a board
    config: str = ""
    options: tuple[tuple[str, Any], ...] = ()  # of its command; one may appear twice
    overrides: Overrides = field(default_factory=dict)  # of its config, by full key
    num_gpus: int = 0  # 0: it does not start processes
    imports: tuple[str, ...] = ()  # modules with parts of others
    length: int = 1  # of a pretraining: in units of the suite's steps
    key: str = ""

    @property
    def program(self) -> str:
        """Return the console command."""
        return f"kscl-{self.tool.rpartition('.')[2].replace('_', '-')}"

    @property
    def arguments(self) -> list[str]:
        """Return the words of the command line behind the program."""
        words = list(self.inputs)
        if self.config:
            words += ["--config-file", self.config, "--auto-resume"]
        words += [word for module in self.imports for word in ("--import", module)]
        if self.num_gpus:
            words += ["--num-gpus", str(self.num_gpus)]
        for name, value in self.options:
            several = list(value) if isinstance(value, list | tuple) else [value]
            words += [f"--{name.replace('_', '-')}", *map(_word, several)]
        return words + override_words(self.overrides)

    @property
    def command(self) -> list[str]:
        """Return the program and its arguments."""
        return [self.program, *self.arguments]

    def need(self, kind: str) -> Stage | None:
        """Return the stage of this kind that it waits for."""
        return next((stage for stage in self.needs if stage.kind == kind), None)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else one_line(value)


def plan(suite: Suite) -> list[Stage]:
    """Return every stage, each after those it needs."""
    stages = [_shapes(suite)] if suite.shapes else []
    data = tuple(stages)
    for contender in suite.contenders:
        for seed in contender.seeds:
            stages += _contender_stages(_Backbone(suite, contender, seed, data))
    shown = [stage for stage in stages if stage.kind not in ("shapes", "convert", "basis")]
    figures = [stage for stage in stages if stage.kind == "basis"]
    folder = f"{suite.output_dir}/{suite.board}"
    board = Stage(
        name="leaderboard",
        kind="board",
        tool="kscl.commands.leaderboard",
        folder=folder,
        needs=(*shown, *figures),
        inputs=tuple(stage.folder for stage in shown),
        options=(
            ("output_dir", folder),
            ("title", suite.name),
            *(("baseline", method) for method in suite.baseline),
        ),
        imports=suite.import_,
    )
    return [*stages, _keyed(board)]


def _shapes(suite: Suite) -> Stage:
    folder = str(suite.shapes.get("output_dir", SHAPES_FOLDER))
    options = tuple(suite.shapes.items())
    return _keyed(Stage("shapes", "shapes", "kscl.commands.make_shapes", folder, options=options))


@dataclass(frozen=True)
class _Backbone:
    """What all stages of one contender and seed share."""

    suite: Suite
    contender: Contender
    seed: int
    data: tuple[Stage, ...]  # the stage that draws the data, if there is one
    pretrain: Stage | None = None

    @property
    def run(self) -> str:
        return f"{self.contender.name}/seed{self.seed}"

    @property
    def weights(self) -> str:
        if self.pretrain is not None:
            return f"{self.pretrain.folder}/{BACKBONE_FILE}"
        return self.contender.file or RANDOM

    @property
    def files(self) -> list[str]:
        return [self.contender.file] if self.contender.file else []


def _contender_stages(backbone: _Backbone) -> Iterator[Stage]:
    suite = backbone.suite
    if backbone.contender.pretrain:
        pretrain = _pretrain(backbone)
        backbone = replace(backbone, pretrain=pretrain)
        yield pretrain
        if suite.basis_image:
            output = f"{pretrain.folder}/basis.png"
            options = (
                *(("checkpoint", pretrain.folder), ("image", suite.basis_image)),
                ("output", output),
            )
            basis = Stage(
                name=f"{backbone.run}/basis",
                kind="basis",
                tool="kscl.commands.visualize_basis",
                folder=output,
                needs=(pretrain,),
                options=options,
                imports=suite.import_,
            )
            yield _keyed(basis, [suite.basis_image])
    for evaluation in suite.evaluations:
        command = commands()[evaluation.kind]
        if command.prepared_by:
            convert = _convert(backbone, evaluation, command)
            yield convert
            yield _fine_tune(backbone, evaluation, command, convert)
        else:
            yield _probe(backbone, evaluation, command)


def _pretrain(backbone: _Backbone) -> Stage:
    suite, contender = backbone.suite, backbone.contender
    stage = Stage(
        name=f"{backbone.run}/pretrain",
        kind="pretrain",
        tool=commands()[PRETRAIN].module,
        folder="",
        needs=backbone.data,
        config=contender.pretrain,
        overrides={
            **suite.pretrain_overrides,
            **contender.overrides,
            "LABEL": contender.label,
            "SEED": backbone.seed,
        },
        num_gpus=suite.num_gpus,
        imports=suite.import_,
        length=contender.lengths[0],
    )
    start = _values([contender.pretrain], stage.overrides).get("BACKBONE.WEIGHTS")
    return _in_folder(suite, stage, [contender.pretrain, *([str(start)] if start else [])])


def _probe(backbone: _Backbone, evaluation: Evaluation, command: Command) -> Stage:
    suite, contender = backbone.suite, backbone.contender
    overrides: Overrides = {
        "LABEL": contender.label,
        **evaluation.overrides,
        "SEED": backbone.seed,
        "BACKBONE.WEIGHTS": backbone.weights,
    }
    if backbone.pretrain is None:
        network = {
            "BACKBONE.NAME": contender.arch,
            "BACKBONE.CONTAINER": contender.container,
            "BACKBONE.PREFIX": contender.prefix,
            "INPUT.MEAN": list(contender.mean),
            "INPUT.STD": list(contender.std),
        }
        overrides |= {key: value for key, value in network.items() if value}
        overrides |= {f"BACKBONE.KWARGS.{key}": it for key, it in contender.kwargs.items()}
    stage = Stage(
        name=f"{backbone.run}/{evaluation.name}",
        kind=evaluation.kind,
        tool=command.module,
        folder="",
        needs=(*backbone.data, *([backbone.pretrain] if backbone.pretrain else [])),
        config=evaluation.config,
        overrides=overrides,
        num_gpus=evaluation.num_gpus or suite.num_gpus,
        imports=suite.import_,
    )
    return _in_folder(suite, stage, [evaluation.config, *backbone.files])


def _convert(backbone: _Backbone, evaluation: Evaluation, command: Command) -> Stage:
    contender = backbone.contender
    network: Overrides = {}
    if backbone.pretrain is None:
        if contender.arch:
            network = {"arch": contender.arch, "arch_kwargs": contender.kwargs}
        for key in ("container", "prefix", "mean", "std"):
            if value := getattr(contender, key):
                network[key] = value
        if not contender.file:
            network["seed"] = backbone.seed
    named_by_kind = evaluation.name == evaluation.kind
    stage = Stage(
        name=f"{backbone.run}/{'' if named_by_kind else f'{evaluation.name}-'}convert",
        kind="convert",
        tool=command.prepared_by,
        folder="",
        needs=(backbone.pretrain,) if backbone.pretrain else (),
        inputs=(backbone.weights,),
        options=(*network.items(), ("protocol", evaluation.config)),
    )
    stage = _keyed(stage, [evaluation.config, *backbone.files])
    folder = _folder(backbone.suite, stage)
    return replace(stage, folder=folder, options=(*stage.options, ("output_dir", folder)))


def _fine_tune(
    backbone: _Backbone, evaluation: Evaluation, command: Command, convert: Stage
) -> Stage:
    overrides = {**evaluation.overrides, "SEED": backbone.seed * evaluation.trials}
    label = "" if backbone.pretrain else backbone.contender.label
    if label not in ("", RANDOM):  # what the weights do not say themselves
        overrides = {"KSCL.LABEL": label, **overrides}
    stage = Stage(
        name=f"{backbone.run}/{evaluation.name}",
        kind=evaluation.kind,
        tool=command.module,
        folder="",
        needs=(*backbone.data, convert),
        config=f"{convert.folder}/config.yaml",
        options=((command.trials, evaluation.trials),),
        overrides=overrides,
        num_gpus=evaluation.num_gpus or backbone.suite.num_gpus,
        imports=backbone.suite.import_,
    )
    return _in_folder(backbone.suite, stage, [evaluation.config])


def _in_folder(suite: Suite, stage: Stage, files: Sequence[str]) -> Stage:
    """Return the stage with its key and an OUTPUT_DIR: a changed stage gets another folder."""
    stage = _keyed(stage, [*files, *_data(files, stage.overrides)])
    folder = _folder(suite, stage)
    return replace(stage, folder=folder, overrides=stage.overrides | {"OUTPUT_DIR": folder})


def _folder(suite: Suite, stage: Stage) -> str:
    return f"{suite.output_dir}/{stage.name}-{stage.key[:KEY_LENGTH]}"


# Keys: what a stage is given and reads, by content


def _keyed(stage: Stage, files: Sequence[str] = ()) -> Stage:
    """Return the stage with the hash of all that it is given, and of the files and data it reads.

    Data that an earlier stage makes is known by the key of that stage. The code is not part of it:
    a result of older code is kept, and the leaderboard marks it as stale.
    """
    made = _folders(stage.needs)
    content = {
        "program": stage.program,
        "arguments": replace(stage, imports=()).arguments,
        "needs": [need.key for need in stage.needs],
        "files": [_content(file, made) for file in files],
    }
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return replace(stage, key=key)


def _folders(stages: Sequence[Stage]) -> list[str]:
    """Return what these stages make, and those before them."""
    return [folder for stage in stages for folder in (stage.folder, *_folders(stage.needs))]


def _data(files: Sequence[str], overrides: Overrides) -> list[str]:
    """Return the data that a stage reads, by its overrides or else by its config files."""
    values = _values(files, overrides)
    sets = [key for key in values if key.startswith(SETS) and key.endswith(PARTS)]
    found: list[str] = []
    for key in (*PATH_KEYS, *sets):
        value = values.get(key)
        found += [str(name) for name in (value if isinstance(value, list | tuple) else [value])]
    return [name for name in found if name and name != "None"]


def _values(files: Sequence[str], overrides: Overrides) -> dict[str, object]:
    values: dict[str, object] = {}
    for file in files:
        if Path(file).suffix in (".yaml", ".yml"):
            values |= dict(leaves(file_values(file)))
    return values | dict(leaves(overrides))


def _content(name: str, made: Sequence[str]) -> str:
    """Return a hash of what a file or folder holds; for a config, of the values that it sets.

    What an earlier stage has `made` is known by its name, and so is what does not exist, or not on
    this machine.
    """
    if is_set_name(name):
        source = parse_source(name)
        return "/".join([source.split, *(_content(str(part), made) for part in source.parts)])
    path = Path(name)
    if any(path.is_relative_to(folder) for folder in made):
        return name
    if path.suffix in (".yaml", ".yml"):
        values = json.dumps(file_values(name), sort_keys=True, default=str)
        return hashlib.sha256(values.encode()).hexdigest()
    if path.is_dir():
        return "/".join([fingerprint(path).hash, *_cut_from(path)])
    if not path.is_file():
        return "/".join(_shards(name)) or name
    images = fingerprint_of_list(name) if path.suffix.lower() == ".txt" else None
    return f"{sha256_of(path)}/{images.hash}" if images else sha256_of(path)


def _cut_from(folder: Path) -> list[str]:
    """Return the hash of the photos beside a folder: its tiles are copies of their parts."""
    photos = folder.parent / PHOTOS
    if folder == photos or not photos.is_dir():
        return []
    try:
        return [fingerprint(photos).hash]
    except KsclError:  # links to photos that are gone; the tiles are still there
        return []


def _shards(pattern: str) -> list[str]:
    """Return the hashes of tar shards, or none if any of them is missing."""
    if is_remote(pattern) or not is_shard_pattern(pattern):
        return []
    try:
        return [fingerprint(shard).hash for shard in expand_shards(pattern)]
    except KsclError:  # reported by the check of the stage
        return []
