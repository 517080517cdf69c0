"""The keys of a suite file; everything that is wrong in a file is reported at once.

The comment of a key is its documentation: docs/suite.md shows it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from kscl.benchmark.suite.numbers import estimate_problems, number_lists
from kscl.benchmark.suite.references import reference_problems
from kscl.benchmark.suite.steps import length_problems, step_problems, with_steps
from kscl.config import COMMAND_LINE, find_config, one_line, raise_problems, read_mapping
from kscl.errors import ConfigError
from kscl.keys import load_config
from kscl.run.task import evaluation_kinds

Overrides = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """Where a backbone comes from: a pretraining config, a file, or random weights."""

    # The key of the contender, and the LABEL of its rows unless its overrides set another.
    name: str
    # The config file of a pretraining.
    pretrain: str = ""
    # A file of weights, of this project or another one, instead of a pretraining.
    file: str = ""
    # The timm model: of a file that does not name it, or else of random weights.
    arch: str = ""
    # Arguments for timm.create_model, with arch.
    kwargs: dict[str, Any] = field(default_factory=dict)
    # Where in a file with several networks or an unknown layout the tensors are: the keys that lead
    # to them, joined by dots.
    container: str = ""
    # What stands before the network's names there.
    prefix: str = ""
    # Mean of red, green and blue in [0, 1] of a file whose input is not known.
    mean: tuple[float, ...] = ()
    # Standard deviation of the same.
    std: tuple[float, ...] = ()
    # Settings of the pretraining that differ from its config, by full key.
    overrides: Overrides = field(default_factory=dict)
    # Seeds of this contender, instead of those of the suite.
    seeds: tuple[int, ...] = ()
    # Lengths of this contender, instead of those of the suite; or a mapping of each to its seeds.
    lengths: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """Return what the leaderboard calls the contender."""
        return str(self.overrides.get("LABEL", self.name))


@dataclass(frozen=True)
class Evaluation:
    """One way of measuring every contender; a suite may have several of one kind."""

    # The key of the evaluation, and the name of its folders.
    name: str
    # The config file of the evaluation.
    config: str
    # What is done: linear, knn, svm, low_shot, linear_suite, finetune or detection. Not needed if
    # the key of the evaluation says it.
    kind: str = ""
    # Fine-tuning trials per backbone, each with its own seed; only for detection.
    trials: int = 1
    # Processes of this evaluation; 0 means those of the suite.
    num_gpus: int = 0
    # Settings that differ from the config, by full key.
    overrides: Overrides = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """A comparison: every contender is measured by every evaluation."""

    # The title of the leaderboard.
    name: str
    # The folder for everything that is made; suites may share it.
    output_dir: str
    # The backbones to compare, by name; see below.
    contenders: tuple[Contender, ...]
    # What to measure, by name; see below.
    evaluations: tuple[Evaluation, ...]
    # Seeds of every contender: each is pretrained and evaluated once per seed.
    seeds: tuple[int, ...] = (0,)
    # Processes per stage, on GPUs or else on cores.
    num_gpus: int = 1
    # Number of stages to run at the same time.
    jobs: int = 1
    # Options of tools/make_shapes.py, if the suite needs the drawn data set.
    shapes: dict[str, Any] = field(default_factory=dict)
    # Settings of every pretraining, by full key.
    pretrain_overrides: Overrides = field(default_factory=dict)
    # Steps of each pretraining (its SOLVER.MAX_STEPS), by contender, for comparisons at equal time:
    # tools/equal_time.py measures and writes them.
    steps: dict[str, Any] = field(default_factory=dict)
    # Multiples of `steps`: every pretraining that has steps is made once per length.
    lengths: tuple[int, ...] = (1,)
    # Seconds of one stage, by kind, to show the time to go until a stage of that kind has finished:
    # tools/start.py measures and writes them.
    estimates: dict[str, Any] = field(default_factory=dict)
    # An image whose basis images are shown on the page for every pretrained contender.
    basis_image: str = ""
    # The folder of the leaderboard inside output_dir.
    board: str = "leaderboard"
    # Labels of the rows to which the leaderboard shows the difference of every other row.
    baseline: tuple[str, ...] = ()


def types_of_keys(declaration: type, *without: str) -> dict[str, Any]:
    """Return the keys that a file may use and the type of each value."""
    return {
        name: list if get_origin(hint) is tuple else get_origin(hint) or hint
        for name, hint in get_type_hints(declaration).items()
        if name not in without
    }


KEYS_OF_SUITE = types_of_keys(Suite) | {"contenders": dict, "evaluations": dict}
KEYS_OF_CONTENDER = types_of_keys(Contender, "name") | {"lengths": list | dict}
KEYS_OF_EVALUATION = types_of_keys(Evaluation, "name")
OF_FILES = ("file", "arch", "kwargs", "container", "prefix", "mean", "std")
EVALUATION_KINDS = evaluation_kinds()
FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
OTHER_STAGES = ("pretrain", "basis", "convert")
STAGE_KINDS = ("shapes", *OTHER_STAGES, *EVALUATION_KINDS, "board")
REQUIRED = ("name", "output_dir", "contenders", "evaluations")
IN_WORDS: dict[Any, str] = {str: "text", int: "a whole number", list: "a list", dict: "a mapping"}
IN_WORDS |= {list | dict: "a list or a mapping"}


def read_suite(name: str | Path, *, with_lengths: bool = True) -> Suite:
    """Return the suite in this file, or a shipped one; raise one error with all that is wrong."""
    path = find_config(name)
    values = read_mapping(path)
    problems = [*_problems(values), *(length_problems(values) if with_lengths else ())]
    raise_problems(problems, f"the suite {path}")
    seeds = tuple(values.get("seeds", [0]))
    described = with_steps(values) if with_lengths else values["contenders"]
    defaults = {"seeds": seeds, "lengths": (1,)}
    contenders = (
        Contender(key, **(about | {k: tuple(about.get(k, v)) for k, v in defaults.items()}))
        for key, about in described.items()
    )
    others = {k: v for k, v in values.items() if k not in ("contenders", "evaluations", "seeds")}
    return Suite(
        contenders=tuple(contenders),
        evaluations=tuple(
            Evaluation(str(key), **({"kind": str(key)} | about))
            for key, about in values["evaluations"].items()
        ),
        seeds=seeds,
        **others,
    )


def override_words(overrides: Overrides) -> list[str]:
    """Return overrides as the words KEY VALUE of a command line."""
    return [
        word
        for key, value in overrides.items()
        for word in (str(key), value if isinstance(value, str) else one_line(value))
    ]


def _problems(values: Mapping[str, Any]) -> Iterator[str]:
    yield from key_problems("the suite", values, KEYS_OF_SUITE)
    for key in REQUIRED:
        if not values.get(key):
            yield f"{key} is missing or empty."
    yield from number_lists("the suite", values)
    shared = _mapping(values, "pretrain_overrides")
    if "LABEL" in shared:
        yield "pretrain_overrides: LABEL is for one contender: write it into its overrides."
    for key, about in _mapping(values, "contenders").items():
        yield from _contender(f"contender {key}", about, shared)
    yield from step_problems(values)
    yield from estimate_problems(_mapping(values, "estimates"), STAGE_KINDS)
    yield from reference_problems(values)
    evaluations = _mapping(values, "evaluations")
    for key, about in evaluations.items():
        yield from _evaluation(str(key), about)
    yield from _same_twice(evaluations)


def _contender(where: str, about: object, shared: Overrides) -> Iterator[str]:
    if not isinstance(about, dict):
        yield f"{where} must be a mapping with pretrain, file or arch."
        return
    yield from key_problems(where, about, KEYS_OF_CONTENDER)
    yield from number_lists(where, about)
    overrides = _mapping(about, "overrides")
    if "pretrain" in about:
        if of_files := ", ".join(key for key in OF_FILES if key in about):
            yield f"{where}: The pretraining names the network: remove {of_files}."
        yield from _pretraining(where, about, {**shared, **overrides})
        return
    if without_effect := [key for key in overrides if key != "LABEL"]:
        yield f"{where}: {without_effect[0]} overrides a pretraining, and there is none: remove it."
    for key in ("mean", "std"):
        if not _is_color(about.get(key)) and ("mean" in about or "std" in about):
            yield f"{where}: {key} must be three numbers (mean and std go together)."
    if "file" in about:
        if isinstance(about["file"], str) and not Path(about["file"]).is_file():
            yield f"{where}: file {about['file']}: no such file."
    elif "arch" not in about:
        yield f"{where} has no backbone: set pretrain, file, or arch (random weights)."


def _is_color(value: Any) -> bool:
    three = isinstance(value, list) and len(value) == 3
    return three and all(type(number) in (int, float) for number in value)


def _pretraining(where: str, about: Mapping[str, Any], overrides: Overrides) -> Iterator[str]:
    """Yield what is wrong with the config of a pretraining and its overrides."""
    try:
        load_config(about["pretrain"], override_words(overrides))
    except ConfigError as error:
        yield f"{where}: {error}".replace(COMMAND_LINE, "overrides").replace("\n", "\n    ")
    except TypeError:
        yield f"{where}: pretrain must be the path of a config file."


def _evaluation(name: str, about: object) -> Iterator[str]:
    where = f"evaluation {name}"
    if not isinstance(about, dict):
        yield f"{where} must be a mapping with a config."
        return
    if not FOLDER_NAME.fullmatch(name) or name in OTHER_STAGES:
        yield f"{where}: Folders are named by it; choose another name of letters, digits, - and _."
    kind = about.get("kind", name)
    if kind not in EVALUATION_KINDS:
        what = f"There is no kind {kind!r}" if "kind" in about else "kind is missing"
        yield f"{where}: {what}; write kind: and one of {', '.join(EVALUATION_KINDS)}."
    yield from key_problems(where, about, KEYS_OF_EVALUATION)
    gpus = about.get("num_gpus", 0)
    if isinstance(gpus, int) and gpus < 0:
        yield f"{where}: num_gpus is {gpus}; it must be at least 1, or 0 for that of the suite."
    try:
        find_config(str(about.get("config", "")))
    except ConfigError as error:
        yield f"{where}: config: {error}"
    trials = about.get("trials", 1)
    if isinstance(trials, int) and trials < 1:
        yield f"{where}: trials is {trials}; it must be at least 1."
    if kind != "detection" and trials != 1:
        yield f"{where}: trials is only for detection: remove it, or use more seeds."


def _same_twice(evaluations: Mapping[str, Any]) -> Iterator[str]:
    """Yield evaluations that would put the same numbers into the same column twice."""
    seen: dict[str, object] = {}
    for name, about in evaluations.items():
        if not isinstance(about, dict):
            continue
        measures = (about.get("kind", name), about.get("config"), about.get("overrides") or {})
        first = seen.setdefault(str(measures), name)
        if first is not name:
            yield f"evaluation {name} measures the same as {first}: remove one of them."


def key_problems(where: str, about: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[str]:
    """Yield every key that is not known, and every value of another type."""
    for key, value in about.items():
        if key not in known:
            nearest = difflib.get_close_matches(str(key), list(known), n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"choose from {', '.join(known)}."
            yield f"{where}: {key} is not a key; {hint}"
        elif not isinstance(value, known[key]) or isinstance(value, bool):
            yield f"{where}: {key} takes {IN_WORDS[known[key]]}, not {value!r}."


def _mapping(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}
