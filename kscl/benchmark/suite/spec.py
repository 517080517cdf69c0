"""The keys of a suite file; everything that is wrong in a file is reported at once.

The comment of a key is its documentation: docs/suite.md shows it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from kscl.config import COMMAND_LINE, find_config, one_line, raise_problems, read_mapping
from kscl.errors import ConfigError
from kscl.keys import load_config
from kscl.registry import import_modules
from kscl.run.task import PRETRAIN, commands, evaluation_kinds
from kscl.runtime.paths import is_named

Overrides = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """Where a backbone comes from: a pretraining config, a file, or random weights."""

    # The key of the contender, and the LABEL of its rows unless its overrides set another.
    name: str
    # The config file of a pretraining.
    pretrain: str = ""
    # Weights instead of a pretraining: a file of this project or another one, timm:NAME,
    # hf-hub:OWNER/NAME, torchvision:ENUM.MEMBER or an http(s) address.
    file: str = ""
    # How a published hash of the file begins, e.g. md5:59fd9945 or sha256:….
    checksum: str = ""
    # The timm model: of a file that does not name it, or else of random weights.
    arch: str = ""
    # Arguments for timm.create_model, with arch.
    kwargs: dict[str, Any] = field(default_factory=dict)
    # Where in a file with several networks or an unknown layout the tensors are: the keys that lead
    # to them, joined by dots.
    container: str = ""
    # Key prefix of the network's tensors there, e.g. module.encoder_q.
    prefix: str = ""
    # Mean of red, green and blue in [0, 1] of a file whose input is not known.
    mean: tuple[float, ...] = ()
    # Standard deviation of the same.
    std: tuple[float, ...] = ()
    # Settings of the pretraining that differ from its config, by full key.
    overrides: Overrides = field(default_factory=dict)
    # How many times as long as its config says an evaluation trains this contender, by evaluation,
    # e.g. {detection: 2.5}, to spend a pretraining's time there instead. Its rows are compared with
    # all others and say so; the contender is measured by these evaluations alone.
    longer: dict[str, Any] = field(default_factory=dict)
    # Seconds of one stage of this contender, by kind, instead of those of the suite.
    estimates: dict[str, Any] = field(default_factory=dict)
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
    # What is done, e.g. linear, knn or detection; see below. Not needed if the key of the
    # evaluation says it.
    kind: str = ""
    # Fine-tuning trials per backbone, each with its own seed; only for detection.
    trials: int = 1
    # Processes of this evaluation; 0 means those of the suite.
    num_gpus: int = 0
    # Fractions of the labels for this evaluation, instead of those of the suite.
    fractions: tuple[float, ...] = ()
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
    # Fractions of the labeled training images, 1 among them: every evaluation is made with each,
    # and the leaderboard shows how many labels a pretraining saves.
    fractions: tuple[float, ...] = (1,)
    # Random draws of each fraction below 1, per seed; all contenders get the same images.
    draws: int = 1
    # Modules with parts of your own, imported in every stage; see docs/extending.md.
    import_: tuple[str, ...] = ()
    # Processes per stage, on GPUs or else on cores.
    num_gpus: int = 1
    # Number of stages to run at the same time.
    jobs: int = 1
    # Options of kscl shapes, if the suite needs the drawn data set.
    shapes: dict[str, Any] = field(default_factory=dict)
    # Settings of every pretraining, by full key.
    pretrain_overrides: Overrides = field(default_factory=dict)
    # Steps of each pretraining (its SOLVER.MAX_STEPS), by contender, for comparisons at equal time:
    # kscl equal-time measures and writes them.
    steps: dict[str, Any] = field(default_factory=dict)
    # Multiples of `steps`: every pretraining that has steps is made once per length.
    lengths: tuple[int, ...] = (1,)
    # Seconds of one stage, by kind, to show the time to go until a stage of that kind has finished:
    # kscl start measures and writes them.
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
        name.rstrip("_"): list if get_origin(hint) is tuple else get_origin(hint) or hint
        for name, hint in get_type_hints(declaration).items()
        if name not in without
    }


KEYS_OF_SUITE = types_of_keys(Suite) | {"contenders": dict, "evaluations": dict}
KEYS_OF_CONTENDER = types_of_keys(Contender, "name") | {"lengths": list | dict}
KEYS_OF_EVALUATION = types_of_keys(Evaluation, "name")
IN_WORDS: dict[Any, str] = {str: "text", int: "a whole number", list: "a list", dict: "a mapping"}
IN_WORDS |= {list | dict: "a list or a mapping"}
OF_FILES = ("file", "checksum", "arch", "kwargs", "container", "prefix", "mean", "std")
OTHER_STAGES = (PRETRAIN, "basis", "convert")
FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
ROW_KEY = re.compile(r"[0-9a-f]{8}")  # as the page of a board shows it
CHECKSUM = re.compile(r"(md5|sha256):[0-9a-f]{8,64}")
RANDOM = "random"
SHAPES_FOLDER = "datasets/shapes"  # where shapes are drawn unless the suite says otherwise
MAX_STEPS = "SOLVER.MAX_STEPS"


def read_suite(
    name: str | Path, *, num_seeds: int | None = None, steps: Mapping[str, int] | None = None
) -> Suite:
    """Return the suite in this file, or a shipped one; raise one error with all that is wrong.

    `num_seeds` replaces the suite's `seeds`; contenders with seeds of their own keep them. `steps`
    replaces those of the file, as measured; none are needed while they are yet to be measured.
    """
    path = find_config(name)
    values = read_mapping(path)
    if num_seeds is not None:
        values["seeds"] = list(range(num_seeds))
    if steps is not None:
        values["steps"] = dict(steps)
    import_modules([str(module) for module in _sequence(values, "import")])
    raise_problems(list(_problems(values, need_steps=steps is None)), f"the suite {path}")
    seeds = tuple(values.get("seeds", [0]))
    defaults: dict[str, Any] = {"seeds": seeds, "lengths": (1,), "mean": (), "std": ()}
    others = {k: v for k, v in values.items() if k not in ("contenders", "evaluations", "import")}
    return Suite(
        contenders=tuple(
            Contender(key, **(about | {k: tuple(about.get(k, v)) for k, v in defaults.items()}))
            for key, about in with_steps(values).items()
        ),
        evaluations=tuple(
            Evaluation(str(key), **({"kind": str(key)} | about))
            for key, about in values["evaluations"].items()
        ),
        import_=tuple(values.get("import", ())),
        **(others | {"seeds": seeds}),
    )


def only(suite: Suite, names: Sequence[str]) -> Suite:
    """Return the suite with these contenders alone."""
    known = {contender.name: contender for contender in suite.contenders}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--only {unknown[0]}: no such contender; {_hint(unknown[0], known)}")
    return replace(suite, contenders=tuple(known[name] for name in dict.fromkeys(names)))


def stage_kinds() -> tuple[str, ...]:
    """Return the kinds of stages that a suite may have."""
    return ("shapes", *OTHER_STAGES, *evaluation_kinds(), "board")


def override_words(overrides: Overrides) -> list[str]:
    """Return overrides as the words KEY VALUE of a command line."""
    return [
        word
        for key, value in overrides.items()
        for word in (str(key), value if isinstance(value, str) else one_line(value))
    ]


def with_steps(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the contenders with the steps that the suite gives them, one for each length."""
    found: dict[str, dict[str, Any]] = {}
    for key, about in values["contenders"].items():
        steps = values.get("steps", {}).get(key)
        if steps is None:
            found[key] = about
            continue
        lengths = about.get("lengths", values.get("lengths", [1]))
        for length in lengths:
            overrides = {"LABEL": key, **about.get("overrides", {}), MAX_STEPS: length * steps}
            name = key if length == 1 else f"{key}_x{length}"  # so that suites can share length 1
            found[name] = {**about, "overrides": overrides, "lengths": (length,)}
            if isinstance(lengths, dict):
                found[name]["seeds"] = lengths[length]
    return found


# What is wrong with a file


def _problems(values: Mapping[str, Any], need_steps: bool) -> Iterator[str]:
    yield from key_problems("the suite", values, KEYS_OF_SUITE)
    for key in ("name", "output_dir", "contenders", "evaluations"):
        if not values.get(key):
            yield f"{key} is missing or empty."
    yield from _number_lists("the suite", values)
    yield from _fractions("the suite", values)
    yield from too_small("the suite", values, {"draws": 1})
    shared = _mapping(values, "pretrain_overrides")
    if "LABEL" in shared:
        yield "pretrain_overrides: LABEL is for one contender: write it into its overrides."
    contenders = _mapping(values, "contenders")
    for key, about in contenders.items():
        yield from _contender(f"contender {key}", about, shared)
    yield from _steps(values, need_steps)
    yield from _estimates("estimates", values)
    evaluations = _mapping(values, "evaluations")
    for key, about in contenders.items():
        if isinstance(about, dict):
            yield from _estimates(f"contender {key}: estimates", about)
            yield from _longer(f"contender {key}: longer", about, evaluations)
    described = {key: about for key, about in contenders.items() if isinstance(about, dict)}
    yield from _baselines(values, described)
    if any("pretrain" in about for about in described.values()):
        yield from _basis_image(values)
    measured: dict[str, object] = {}
    for key, about in evaluations.items():
        yield from _evaluation(str(key), about)
        if isinstance(about, dict):
            same = str((about.get("kind", key), about.get("config"), about.get("overrides") or {}))
            if (first := measured.setdefault(same, key)) is not key:
                yield f"evaluation {key} measures the same as {first}: remove one of them."


def key_problems(where: str, about: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[str]:
    """Yield every key that is not known, and every value of another type."""
    for key, value in about.items():
        if key not in known:
            yield f"{where}: {key} is not a key; {_hint(str(key), known)}"
        elif not isinstance(value, known[key]) or isinstance(value, bool):
            yield f"{where}: {key} takes {IN_WORDS[known[key]]}, not {value!r}."


def _number_lists(where: str, about: Mapping[str, Any]) -> Iterator[str]:
    """Yield lists that do not hold different whole numbers."""
    for key, least in (("seeds", 0), ("lengths", 1)):
        given = about.get(key, [1])
        if key == "lengths" and isinstance(given, dict):
            for length, seeds in given.items():
                yield from _number_lists(f"{where}: length {length}", {"seeds": seeds})
            given = list(given)
        good = isinstance(given, list) and given and all(type(n) is int for n in given)
        if not good or min(given) < least or len(set(given)) != len(given):
            yield f"{where}: {key} must be a list of different whole numbers, got {given!r}."


def _estimates(where: str, about: Mapping[str, Any]) -> Iterator[str]:
    for kind, seconds in _mapping(about, "estimates").items():
        if kind not in stage_kinds():
            known = ", ".join(stage_kinds())
            yield f"{where}: {kind} is not a kind of stage; choose from {known}."
        elif type(seconds) not in (int, float) or not 0 <= seconds < float("inf"):
            yield f"{where}: {kind} must be a number of seconds, got {seconds!r}."


def _longer(where: str, about: Mapping[str, Any], evaluations: Mapping[str, Any]) -> Iterator[str]:
    """Yield evaluations that there are not or that train nothing, and numbers not above 1."""
    for name, times in _mapping(about, "longer").items():
        if name not in evaluations:
            yield f"{where}: {name} is not an evaluation; {_hint(str(name), evaluations)}"
            continue
        kind = _mapping(evaluations, name).get("kind", name)
        if kind in commands() and not commands()[kind].longer:
            yield f"{where}: {name} trains nothing: remove it."
        if type(times) not in (int, float) or not 1 < times < float("inf"):
            yield f"{where}: {name} must be a number greater than 1, got {times!r}."


def _fractions(where: str, about: Mapping[str, Any]) -> Iterator[str]:
    """Yield fractions that are not different numbers in (0, 1], with 1 among them."""
    given = about.get("fractions", [1])
    good = isinstance(given, list) and all(type(n) in (int, float) and 0 < n <= 1 for n in given)
    if not good or 1 not in given or len(set(given)) != len(given):
        expected = "a list of different numbers in (0, 1], 1 among them"
        yield f"{where}: fractions must be {expected}, got {given!r}."


def _contender(where: str, about: object, shared: Overrides) -> Iterator[str]:
    if not isinstance(about, dict):
        yield f"{where} must be a mapping with pretrain, file or arch."
        return
    yield from key_problems(where, about, KEYS_OF_CONTENDER)
    yield from _number_lists(where, about)
    overrides = _mapping(about, "overrides")
    if "pretrain" in about:
        if of_files := ", ".join(key for key in OF_FILES if key in about):
            yield f"{where}: The pretraining names the network: remove {of_files}."
        try:
            load_config(str(about["pretrain"]), override_words({**shared, **overrides}))
        except ConfigError as error:
            yield f"{where}: {error}".replace(COMMAND_LINE, "overrides").replace("\n", "\n    ")
        return
    if without_effect := [key for key in overrides if key != "LABEL"]:
        yield f"{where}: {without_effect[0]} overrides a pretraining, and there is none: remove it."
    for key in ("mean", "std"):
        three = about.get(key)
        is_color = (
            isinstance(three, list) and [type(n) in (int, float) for n in three] == [True] * 3
        )
        if not is_color and ("mean" in about or "std" in about):
            yield f"{where}: {key} must be three numbers (mean and std go together)."
    if "file" in about:
        file = about["file"]
        if isinstance(file, str) and not is_named(file) and not Path(file).is_file():
            yield f"{where}: file {file}: no such file."
        if not CHECKSUM.fullmatch(str(about.get("checksum", "md5:00000000"))):
            yield f"{where}: checksum must be md5: or sha256: and 8 or more digits of it."
    elif "arch" not in about:
        yield f"{where} has no backbone: set pretrain, file, or arch (random weights)."


def _steps(values: Mapping[str, Any], need_steps: bool) -> Iterator[str]:
    """Yield steps of no pretraining, and lengths that have no steps to multiply."""
    contenders, given = _mapping(values, "contenders"), _mapping(values, "steps")
    for key, steps in given.items():
        about = contenders.get(key)
        if not isinstance(about, dict) or "pretrain" not in about:
            yield f"steps: {key} is not a contender with a pretraining: remove it."
        elif type(steps) is not int or steps < 1:
            yield f"steps: {key} must be a whole number from 1 on, got {steps!r}."
        elif MAX_STEPS in _mapping(about, "overrides"):
            yield f"steps: {key} has {MAX_STEPS} among its overrides too: remove one of them."
    for key, about in contenders.items() if need_steps else ():
        pretrained = isinstance(about, dict) and "pretrain" in about
        if pretrained and key not in given and ("lengths" in about or "lengths" in values):
            yield (
                f"contender {key}: lengths multiply steps, and it has none: let "
                "kscl equal-time write them, or remove the lengths."
            )


def _evaluation(name: str, about: object) -> Iterator[str]:
    where = f"evaluation {name}"
    if not isinstance(about, dict):
        yield f"{where} must be a mapping with a config."
        return
    if not FOLDER_NAME.fullmatch(name) or name in OTHER_STAGES:
        yield f"{where}: Folders are named by it; choose another name of letters, digits, - and _."
    kind = about.get("kind", name)
    if kind not in evaluation_kinds():
        what = f"There is no kind {kind!r}" if "kind" in about else "kind is missing"
        yield f"{where}: {what}; write kind: and one of {', '.join(evaluation_kinds())}."
    elif not commands()[kind].trials and about.get("trials", 1) != 1:
        with_trials = ", ".join(kind for kind, command in commands().items() if command.trials)
        yield f"{where}: trials is only for {with_trials}: remove it, or use more seeds."
    yield from key_problems(where, about, KEYS_OF_EVALUATION)
    yield from too_small(where, about, {"num_gpus": 0, "trials": 1})
    yield from _fractions(where, about)
    try:
        find_config(str(about.get("config", "")))
    except ConfigError as error:
        yield f"{where}: config: {error}"


def too_small(where: str, about: Mapping[str, Any], least: Mapping[str, int]) -> Iterator[str]:
    """Yield every whole number that is smaller than it may be."""
    for key, lowest in least.items():
        value = about.get(key)
        if isinstance(value, int) and value < lowest:
            yield f"{where}: {key} must be at least {lowest}, got {value}."


def _baselines(values: Mapping[str, Any], contenders: Mapping[str, Any]) -> Iterator[str]:
    """Yield baselines that no row will have."""
    if any("file" in about for about in contenders.values()):
        return  # a file may say itself what it is called
    labels = {
        str(_mapping(about, "overrides").get("LABEL", key)): key
        for key, about in contenders.items()
    }
    if any("arch" in about for about in contenders.values()):
        labels.setdefault(RANDOM, RANDOM)
    for baseline in map(str, _sequence(values, "baseline")):
        method = re.split("[@,]", baseline)[0]
        if method in labels or ROW_KEY.fullmatch(baseline):
            about = contenders.get(labels.get(method, ""), {})
            has_steps = labels.get(method) in _mapping(values, "steps")
            lengths = about.get("lengths", values.get("lengths", ()))
            several = has_steps and isinstance(lengths, list | dict) and len(lengths) > 1
            if method == baseline and several:
                yield (
                    f"baseline: {baseline} is trained for several lengths: name the epochs of one, "
                    f"as in {baseline}@30."
                )
            continue
        hint = _hint(method, labels)
        if method in contenders:  # what its rows are called
            hint = f"did you mean {_mapping(contenders[method], 'overrides')['LABEL']}?"
        yield f"baseline: {baseline} is the label of no contender; {hint}"


def _basis_image(values: Mapping[str, Any]) -> Iterator[str]:
    image, shapes = values.get("basis_image"), _mapping(values, "shapes")
    if not isinstance(image, str) or not image or Path(image).is_file():
        return
    if not shapes or not Path(image).is_relative_to(str(shapes.get("output_dir", SHAPES_FOLDER))):
        yield f"basis_image: {image}: no such file. Name an image, or remove the key."


def _hint(name: str, known: Mapping[str, Any]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {nearest[0]}?" if nearest else f"choose from {', '.join(known)}."


def _mapping(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _sequence(values: Mapping[str, Any], key: str) -> list[Any]:
    found = values.get(key)
    return found if isinstance(found, list) else []
