"""Plan a suite: its stages as objects, each keyed by the hash of what goes into it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kscl.benchmark.suite.spec import (
    OTHER_STAGES,
    RANDOM,
    SHAPES_FOLDER,
    Contender,
    Evaluation,
    Overrides,
    Suite,
    override_words,
)
from kscl.config import file_values, leaves, one_line, plain
from kscl.data.annotations import is_set_name, parse_source
from kscl.data.labeled import percent_words
from kscl.data.source import is_remote
from kscl.data.tar import expand_shards, is_shard_pattern
from kscl.errors import KsclError
from kscl.keys import load_config
from kscl.main import VERB_OF, python_words
from kscl.records.fingerprint import fingerprint, fingerprint_of_list
from kscl.run.task import PRETRAIN, Command, commands
from kscl.runtime.files import sha256_of
from kscl.runtime.paths import is_named

MAKE_SHAPES, LEADERBOARD = "kscl.commands.make_shapes", "kscl.commands.leaderboard"
VISUALIZE_BASIS = "kscl.commands.visualize_basis"
KEY_LENGTH = 8
BACKBONE_FILE = "backbone.safetensors"
PATH_KEYS = (
    *("DATA.TRAIN", "DATA.VAL", "EVAL.KNN_TRAIN", "EVAL.KNN_VAL"),
    *("DATA.SUBSET", "DATASETS.TRAIN", "DATASETS.TEST"),
)
SETS, PARTS = "SETS.", (".train", ".val", ".test")  # of the linear suite
OF_RANDOM_WEIGHTS = ("zero_init_last",)  # arguments of timm's that leave the network as it is
PHOTOS = "JPEGImages"  # of a set of kscl prepare, which cuts them into a folder of tiles


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
    estimate: float | None = None  # seconds that the suite says it takes
    network: str = ""  # times of stages with another one say nothing about this one
    key: str = ""

    @property
    def program(self) -> list[str]:
        """Return the words that a user types for the tool."""
        return ["kscl", *VERB_OF[self.tool].split()]

    @property
    def runner(self) -> list[str]:
        """Return the words that start the tool in this Python."""
        return python_words(*self.program[1:])

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
        return [*self.program, *self.arguments]

    def need(self, kind: str) -> Stage | None:
        """Return the stage of this kind that it waits for."""
        return next((stage for stage in self.needs if stage.kind == kind), None)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else one_line(value)


def plan(suite: Suite) -> list[Stage]:
    """Return every stage, each after those it needs."""
    stages: list[Stage] = []
    if suite.shapes:
        folder, options = suite.shapes.get("output_dir", SHAPES_FOLDER), tuple(suite.shapes.items())
        shapes = Stage("shapes", "shapes", MAKE_SHAPES, str(folder), options=options)
        stages.append(_keyed(shapes))
    data = tuple(stages)
    for contender in suite.contenders:
        network = network_of(suite, contender)
        for seed in contender.seeds:
            stages += _Backbone(suite, contender, seed, data, network).stages()
    shown = [stage for stage in stages if stage.kind not in ("shapes", "convert", "basis")]
    figures = [stage for stage in stages if stage.kind == "basis"]
    folder = f"{suite.output_dir}/{suite.board}"
    baselines = [("baseline", method) for method in suite.baseline]
    board = Stage(
        *("leaderboard", "board", LEADERBOARD, folder),
        needs=(*shown, *figures),
        inputs=tuple(stage.folder for stage in shown),
        options=(("output_dir", folder), ("title", suite.name), *baselines),
        imports=suite.import_,
    )
    return [*stages, _keyed(board)]


def network_of(suite: Suite, contender: Contender) -> str:
    """Return the timm network of a contender and its arguments; empty if only its file knows."""
    name, kwargs = network_parts(suite, contender)
    kwargs = {key: value for key, value in kwargs.items() if key not in OF_RANDOM_WEIGHTS}
    return f"{name} {one_line(kwargs)}" if name and kwargs else name


def network_parts(suite: Suite, contender: Contender) -> tuple[str, dict[str, Any]]:
    """Return the timm name and the arguments of a contender's network."""
    name, kwargs = contender.arch, contender.kwargs
    if contender.pretrain:
        words = override_words({**suite.pretrain_overrides, **contender.overrides})
        cfg = load_config(contender.pretrain, words)
        name, kwargs = cfg.BACKBONE.NAME, plain(cfg.BACKBONE.KWARGS)
    elif not name and is_named(contender.file):
        from kscl.backbone_file import find_weights  # slow to import

        found = find_weights(contender.file, download=False)
        if found is not None and found.description is not None:
            name, kwargs = found.description.arch, found.description.kwargs
    return name, kwargs


def of_contenders(stages: Sequence[Stage], contenders: Sequence[Contender]) -> list[Stage]:
    """Return the stages of these contenders, and the leaderboard, which waits for them alone.

    It compares with a baseline only if that is one of them.
    """
    *others, board = stages
    names = {contender.name for contender in contenders}
    labels = {contender.label for contender in contenders}
    kept = [it for it in others if it.kind == "shapes" or it.name.partition("/")[0] in names]
    mine = {it.name for it in kept}
    needs = tuple(it for it in board.needs if it.name in mine)
    options = [(key, value) for key, value in board.options if key != "baseline" or value in labels]
    return [*kept, replace(board, needs=needs, options=tuple(options))]


@dataclass
class _Backbone:
    """One contender and seed, and the stages that make and measure it."""

    suite: Suite
    contender: Contender
    seed: int
    data: tuple[Stage, ...]  # the stage that draws the data, if there is one
    network: str
    made_by: tuple[Stage, ...] = ()  # its pretraining, if it has one

    def stages(self) -> Iterator[Stage]:
        if self.contender.pretrain:
            pretrain = self.pretrain()
            self.made_by = (pretrain,)
            yield pretrain
            if self.suite.basis_image:
                yield self.basis(pretrain)
        for evaluation in self.suite.evaluations:
            command = commands()[evaluation.kind]
            if longer := self.contender.longer:
                if evaluation.name not in longer:
                    continue
                overrides = {**evaluation.overrides, command.longer: longer[evaluation.name]}
                evaluation = replace(evaluation, overrides=overrides)
            parts = list(self.fractions(evaluation, command))
            if command.prepared_by:
                convert = self.convert(evaluation, command)
                yield convert
                yield from (self.fine_tune(part, command, convert) for part in parts)
            else:
                yield from (self.probe(part, command) for part in parts)

    def fractions(self, evaluation: Evaluation, command: Command) -> Iterator[Evaluation]:
        """Yield the evaluation with each fraction of the labels and each draw of it."""
        for fraction in evaluation.fractions or self.suite.fractions:
            if fraction == 1:
                yield evaluation
                continue
            for number in range(self.suite.draws):
                # Every seed has draws of its own, and all contenders have the same.
                draw = self.seed * self.suite.draws + number
                name = f"{evaluation.name}{percent_words(fraction)}"
                chosen = {f"{command.labels}.FRACTION": fraction, f"{command.labels}.DRAW": draw}
                yield replace(
                    evaluation,
                    name=f"{name}-draw{draw}" if self.suite.draws > 1 else name,
                    overrides={**evaluation.overrides, **chosen},
                )

    @property
    def weights(self) -> str:
        if self.made_by:
            return f"{self.made_by[0].folder}/{BACKBONE_FILE}"
        return self.contender.file or RANDOM

    def run(
        self,
        name: str,
        kind: str,
        tool: str,
        files: Sequence[str],
        num_gpus: int,
        **given: Any,
    ) -> Stage:
        """Return a run of a task: its OUTPUT_DIR has its key, so a changed one gets another."""
        gpus, imports = num_gpus or self.suite.num_gpus, self.suite.import_
        given |= self.costs(kind)
        stage = Stage(self.name(name), kind, tool, "", num_gpus=gpus, imports=imports, **given)
        stage = _keyed(stage, [*files, *_data(files, stage.overrides)])
        folder = self.folder(stage)
        return replace(stage, folder=folder, overrides=stage.overrides | {"OUTPUT_DIR": folder})

    def costs(self, kind: str) -> dict[str, Any]:
        """Return what is known about the time of a stage."""
        estimates = self.suite.estimates | self.contender.estimates
        network = self.network or self.contender.name
        longer = self.contender.longer if kind not in OTHER_STAGES else {}
        return {"estimate": estimates.get(kind), "network": f"{network} {longer or ''}".strip()}

    def name(self, stage: str) -> str:
        return f"{self.contender.name}/seed{self.seed}/{stage}"

    def folder(self, stage: Stage) -> str:
        return f"{self.suite.output_dir}/{stage.name}-{stage.key[:KEY_LENGTH]}"

    def pretrain(self) -> Stage:
        config = self.contender.pretrain
        overrides = {**self.suite.pretrain_overrides, **self.contender.overrides}
        overrides |= {"LABEL": self.contender.label, "SEED": self.seed}
        start = _values([config], overrides).get("BACKBONE.WEIGHTS")
        return self.run(
            *(PRETRAIN, PRETRAIN, commands()[PRETRAIN].module),
            files=[config, *([str(start)] if start else [])],
            num_gpus=self.suite.num_gpus,
            needs=self.data,
            config=config,
            overrides=overrides,
            length=self.contender.lengths[0],
        )

    def basis(self, pretrain: Stage) -> Stage:
        image, output = self.suite.basis_image, f"{pretrain.folder}/basis.png"
        stage = Stage(
            *(self.name("basis"), "basis", VISUALIZE_BASIS, output),
            needs=(pretrain,),
            options=(("checkpoint", pretrain.folder), ("image", image), ("output", output)),
            imports=self.suite.import_,
            **self.costs("basis"),
        )
        return _keyed(stage, [image])

    def probe(self, evaluation: Evaluation, command: Command) -> Stage:
        contender = self.contender
        overrides: Overrides = {"LABEL": contender.label, **evaluation.overrides}
        overrides |= {"SEED": self.seed, "BACKBONE.WEIGHTS": self.weights}
        if not self.made_by:
            network = {
                "BACKBONE.NAME": contender.arch,
                "BACKBONE.CONTAINER": contender.container,
                "BACKBONE.PREFIX": contender.prefix,
                "INPUT.MEAN": list(contender.mean),
                "INPUT.STD": list(contender.std),
            }
            overrides |= {key: value for key, value in network.items() if value}
            overrides |= {f"BACKBONE.KWARGS.{key}": it for key, it in contender.kwargs.items()}
        return self.run(
            *(evaluation.name, evaluation.kind, command.module),
            files=self.files(evaluation),
            num_gpus=evaluation.num_gpus,
            needs=(*self.data, *self.made_by),
            config=evaluation.config,
            overrides=overrides,
        )

    def files(self, evaluation: Evaluation) -> list[str]:
        return [name for name in (evaluation.config, self.contender.file) if name]

    def convert(self, evaluation: Evaluation, command: Command) -> Stage:
        contender, network = self.contender, dict[str, Any]()
        if not self.made_by:
            if contender.arch:
                network = {"arch": contender.arch, "arch_kwargs": contender.kwargs}
            for key in ("container", "prefix", "mean", "std"):
                if value := getattr(contender, key):
                    network[key] = value
            if not contender.file:
                network["seed"] = self.seed
        prefix = "" if evaluation.name == evaluation.kind else f"{evaluation.name}-"
        stage = Stage(
            *(self.name(f"{prefix}convert"), "convert", command.prepared_by, ""),
            needs=self.made_by,
            inputs=(self.weights,),
            options=(*network.items(), ("protocol", evaluation.config)),
            **self.costs("convert"),
        )
        stage = _keyed(stage, self.files(evaluation))
        folder = self.folder(stage)
        return replace(stage, folder=folder, options=(*stage.options, ("output_dir", folder)))

    def fine_tune(self, evaluation: Evaluation, command: Command, convert: Stage) -> Stage:
        overrides = {**evaluation.overrides, "SEED": self.seed * evaluation.trials}
        if not self.made_by and self.contender.label != RANDOM:  # what the weights do not say
            overrides = {"KSCL.LABEL": self.contender.label, **overrides}
        return self.run(
            *(evaluation.name, evaluation.kind, command.module),
            files=[evaluation.config],
            num_gpus=evaluation.num_gpus,
            needs=(*self.data, convert),
            config=f"{convert.folder}/config.yaml",
            options=((command.trials, evaluation.trials),),
            overrides=overrides,
        )


# Keys: what a stage is given and reads, by content


def _keyed(stage: Stage, files: Sequence[str] = ()) -> Stage:
    """Return the stage with the hash of all that it is given, and of the files and data it reads.

    Data that an earlier stage makes is known by the key of that stage. The code is not part of it:
    a result of older code is kept, and the leaderboard marks it as stale.
    """
    made = _folders(stage.needs)
    content = {
        # Not the verb: under another name the results would be the same.
        "program": f"kscl-{stage.tool.rpartition('.')[2].replace('_', '-')}",
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
    if is_named(name):
        from kscl.backbone_file import cached_weights  # slow to import

        file = cached_weights(name)
        return name if file is None else sha256_of(file)
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
