"""Make a number again from its record: a suite file, what differs here, a run, and a verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kscl.benchmark.leaderboard.entries import label, made_backbone, processes
from kscl.benchmark.leaderboard.reading import RecordFile, inside, is_random, machine, mapping, text
from kscl.benchmark.leaderboard.rows import Measure, build_board, changed_data, stale_reasons
from kscl.benchmark.leaderboard.statistics import prediction_interval
from kscl.benchmark.submission import HIDDEN
from kscl.config import leaves_without, nested
from kscl.data.annotations import is_set_name, parse_source
from kscl.errors import KsclError
from kscl.records.provenance import code_version, library_versions
from kscl.records.record import Record, find_records, read_record
from kscl.registry import imported_modules
from kscl.run.task import PRETRAIN, commands
from kscl.runtime.files import write_atomically
from kscl.runtime.machine import hardware

CONTENDER = "row"
SUITE_FILE = "suite.yaml"
SET_BY_SUITE = ("OUTPUT_DIR", "SEED", "LABEL")
SET_IN_EVALUATIONS = (*SET_BY_SUITE, "BACKBONE.WEIGHTS", "MODEL.WEIGHTS")
LEVELS_UP = 4  # folders above a record in which its pretraining's record is looked for
PATH_KEYS = ("DATA.TRAIN", "DATA.VAL", "DATASETS.TRAIN", "DATASETS.TEST")

Settings = Mapping[str, Mapping[str, str]]  # kind of record → key → value


@dataclass(frozen=True)
class Origin:
    """An evaluation's record, the pretraining that made its backbone, and where both were found."""

    record: Record
    path: Path
    pretraining: Record | None
    folder: Path

    @property
    def records(self) -> list[Record]:
        """Return the records of all stages, in their order."""
        return [*([self.pretraining] if self.pretraining else []), self.record]


def origin(path: Path, folder: Path | None = None) -> Origin:
    """Find what a record was made from, in `folder` or in those above the record."""
    record = read_record(path)
    if record.kind == PRETRAIN:
        raise KsclError(
            f"{path}: Give the record of an evaluation; the pretraining is found from it."
        )
    if is_random(record):
        return Origin(record, path, None, folder or path.resolve().parent)
    wanted = record.inputs.get("backbone")
    for searched in [folder] if folder else _folders_above(path):
        for found in find_records(searched).records.values():
            if found.kind == PRETRAIN and wanted and made_backbone(found) == wanted:
                return Origin(record, path, found, searched)
    raise KsclError(
        f"{path}: The record of the pretraining that made its backbone {str(wanted)[:16]} was not "
        "found. Name the folder that has it with --records."
    )


def _folders_above(path: Path) -> list[Path]:
    """Return the folder of a record and some above it, but none that has the current one in it."""
    place, here = path.resolve().parent, Path.cwd()
    return [it for it in [place, *place.parents][:LEVELS_UP] if not here.is_relative_to(it)]


def write_suite(
    start: Origin, output_dir: Path, settings: Settings, num_gpus: int | None = None
) -> Path:
    """Write the configs and the suite that run every stage again, on as many processes."""
    record, made = start.record, start.pretraining
    contender: dict[str, Any]
    if made is not None:
        config = _config(made, output_dir / "pretrain.yaml", settings)
        contender = {"pretrain": str(config), "overrides": {"LABEL": label(made)}}
        seed = made.seed
    else:
        about = mapping(record.details.get("backbone"))
        kwargs = about.get("kwargs") or about.get("arch_kwargs") or {}
        contender = {"arch": about.get("arch"), "kwargs": kwargs}
        name = text(about.get("method")) or record.name
        contender |= {"overrides": {"LABEL": name}} if name != CONTENDER else {}
        seed = record.seed
    evaluation: dict[str, Any] = {
        "config": str(_config(record, output_dir / f"{record.kind}.yaml", settings)),
        "num_gpus": num_gpus or processes(record),
    }
    if record.seed != seed:
        if not commands()[record.kind].trials or seed != 0 or record.seed < 0:
            raise KsclError(
                f"{start.path}: It was evaluated with seed {record.seed} and pretrained with seed "
                f"{seed}; a suite uses one seed for both. Reproduce a record whose seeds are equal."
            )
        evaluation["trials"] = record.seed + 1
    suite = {
        "name": f"Reproduction of {record.id[:16]}",
        "output_dir": str(output_dir / "output"),
        "seeds": [seed],
        "num_gpus": num_gpus or processes(made or record),
        "import": imported_modules(),
        "contenders": {CONTENDER: contender},
        "evaluations": {record.kind: evaluation},
    }
    path = output_dir / SUITE_FILE
    write_atomically(path, yaml.safe_dump(suite, sort_keys=False).encode())
    return path


def _config(record: Record, path: Path, settings: Settings) -> Path:
    names = SET_BY_SUITE if record.kind == PRETRAIN else SET_IN_EVALUATIONS
    values = {
        key: value
        for key, value in leaves_without(record.config.values, names).items()
        if key in PATH_KEYS or HIDDEN not in str(value)  # a path that a submission left out
    }
    given = settings.get(record.kind, {})
    unknown = [key for key in given if key not in values]
    if unknown:
        raise KsclError(f"--set {record.kind}.{unknown[0]}: The record has no such setting.")
    values |= {key: yaml.safe_load(value) for key, value in given.items()}
    write_atomically(path, yaml.safe_dump(nested(values), sort_keys=False).encode())
    return path


def missing_data(start: Origin, settings: Settings) -> list[str]:
    """Return one sentence for each set of a stage that is not on this machine."""
    found = []
    for record in start.records:
        for key in PATH_KEYS:
            if key in settings.get(record.kind, {}):
                continue
            value = inside(record.config.values, *key.split("."))
            for name in value if isinstance(value, list) else [value]:
                path = str(name or "")
                if is_set_name(path):
                    path = str(parse_source(path).truth)
                if path and not Path(path).exists():
                    found.append(
                        f"{record.kind}: {key} {name} is not here. Name it with "
                        f"--set {record.kind}.{key}=PATH."
                    )
    return found


def other_data(start: Origin, settings: Settings) -> list[str]:
    """Return one sentence for each set that is here but is not the one that was recorded."""
    found = []
    for record in start.records:
        if not settings.get(record.kind):
            file = RecordFile(record, start.path, start.folder, record.kind)
            found += [f"{record.kind}: {reason}" for reason in changed_data(file)]
    return found


def differences_here(start: Origin, settings: Settings, num_gpus: int | None = None) -> list[str]:
    """Return one sentence for everything that is not as it was: code, data, libraries, machine."""
    found = []
    commit, versions = code_version()["commit"], library_versions()
    for record in start.records:
        if num_gpus and num_gpus != processes(record):
            found.append(f"{record.kind}: The number of processes was {processes(record)}.")
        if not settings.get(record.kind):
            file = RecordFile(record, start.path, start.folder, record.kind)
            reasons = stale_reasons([file]).get(record.id, [])
            found += [f"{record.kind}: {reason}" for reason in reasons]
        if commit != record.code.commit:
            found.append(f"{record.kind}: The commit was {record.code.commit} and is {commit}.")
        if record.code.dirty:
            found.append(f"{record.kind}: The code had changes that no commit holds.")
    for name, then in start.record.libraries.items():
        if versions.get(name) != then:
            found.append(f"{name} was {then} and is {versions.get(name)}.")
    here = dataclasses.replace(start.record, hardware=hardware())
    if machine(here) != machine(start.record):
        found.append(f"The machine was {machine(start.record)} and is {machine(here)}.")
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Verdict:
    """How the new number compares with the old one."""

    metric: str
    old: float
    new: float
    interval: tuple[float, float] | None  # 95%, in which one more run is expected
    interval_is: str

    @property
    def inside(self) -> bool | None:
        """Tell whether the new number is expected; None if nothing tells what to expect."""
        if self.new == self.old:
            return True
        if self.interval is None:
            return None
        return self.interval[0] <= self.new <= self.interval[1]

    def sentence(self) -> str:
        """Return the verdict in words."""
        said = f"{self.metric} was {self.old:.2f} and is {self.new:.2f}"
        if self.new == self.old:
            return f"{said}: the same number."
        if self.interval is None:
            return f"{said}. One seed has no interval, so nothing tells whether that is expected."
        low, high = self.interval
        where = "inside" if self.inside else "OUTSIDE"
        return f"{said}: {where} the 95% interval {low:.2f} to {high:.2f} ({self.interval_is})."


def verdict(start: Origin, output_dir: Path) -> Verdict:
    """Compare the new record with the old one; they must have been measured in the same way."""
    record = start.record
    made = find_records(output_dir / "output").records.values()
    mine = [it for it in made if it.kind == record.kind and it.seed == record.seed]
    same = [it for it in mine if it.protocol.hash == record.protocol.hash]
    if not same:
        differing = _differing(record, mine[0]) if mine else "nothing was measured"
        raise KsclError(
            f"The new number is not comparable with the old one: under {record.protocol.id} "
            f"{record.protocol.hash}, {differing}."
        )
    metric = next(it.name for it in record.task.metrics if it.headline)
    old, new = record.metrics[metric], same[0].metrics[metric]
    measure = _measure(start, metric, output_dir.resolve())
    if measure is None:
        return Verdict(metric, old, new, None, "")
    if len(measure.values) > 1:
        of_seeds = f"of one more run, from {len(measure.values)} seeds"
        return Verdict(metric, old, new, prediction_interval(measure.values), of_seeds)
    return Verdict(metric, old, new, measure.interval, measure.interval_is)


def _differing(old: Record, new: Record) -> str:
    then, now = (leaves_without(it.protocol.definition, ()) for it in (old, new))
    keys = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    shown = [f"{key} was {then.get(key)!r} and is {now.get(key)!r}" for key in keys]
    return "; ".join(shown) or "the protocol's name differs"


def _measure(start: Origin, metric: str, output_dir: Path) -> Measure | None:
    """Return the old number's row on the board of the nearest folder that has several seeds.

    A folder that has the new number in it does not count.
    """
    found: Measure | None = None
    for folder in dict.fromkeys([start.folder.resolve(), *_folders_above(start.path)]):
        if folder != start.folder.resolve() and output_dir.is_relative_to(folder):
            break
        board = build_board([folder], check_stale=False, with_reported=False)
        for row in board.rows:
            for result in row.results.values():
                if any(file.id == start.record.id for file in result.records):
                    measure = result.measures.get(metric)
                    if measure and (found is None or len(measure.values) > len(found.values)):
                        found = measure
        if found is not None and len(found.values) > 1:
            break
    return found


def parse_settings(words: Sequence[str]) -> Settings:
    """Return KIND.KEY=VALUE words as kind → key → value."""
    found: dict[str, dict[str, str]] = {}
    for word in words:
        name, equals, value = word.partition("=")
        kind, dot, key = name.partition(".")
        if not equals or not dot:
            raise KsclError(f"--set {word}: Write KIND.KEY=VALUE, as in linear.DATA.TRAIN=photos.")
        found.setdefault(kind, {})[key] = value
    return found
