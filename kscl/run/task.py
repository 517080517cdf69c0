"""What a run computes: `Task`, the metrics that it reports, and the registry of all tasks.

A task is a class in one file, and no table names it:

    @task("knn", title="Classifier (nearest neighbors)")
    class Knn(Probe):
        metrics = (Metric("top1", "kNN", headline=True, per_image=True),)

Built-in tasks are found by reading the decorators in `FOLDERS`; a module is imported when its task
is used, so that names are known without torch or Detectron2. `--import` brings those of others.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from fvcore.common.config import CfgNode

import kscl
from kscl.records.record import Metric, Record, TaskInfo
from kscl.registry import Registry, imported_modules
from kscl.runtime.failures import explained

if TYPE_CHECKING:
    from kscl.run.engine import Run

FOLDERS = ("kscl/engine", "linear_eval/probes", "detection/train")
# The module of the command that runs the tasks of a package, and those derived from them.
COMMANDS = {
    "kscl": "kscl.commands.pretrain",
    "linear_eval": "linear_eval.commands.linear_eval",
    "detection": "detection.commands.train_net",
}
PRETRAIN = "pretrain"  # the task whose records are rows; all others evaluate them


@dataclass
class Inputs:
    """What a run reads; it must be the same when the run is resumed or checked again."""

    data: dict[str, dict[str, Any]]  # role → fingerprint
    files: dict[str, str] = field(default_factory=dict)  # role → SHA-256
    other: dict[str, Any] = field(default_factory=dict)  # what no hash above covers

    def identity(self) -> dict[str, Any]:
        """Return all of it by role."""
        data = {role: known["hash"] for role, known in self.data.items()}
        return {**data, **self.files, **self.other}


class Task:
    """What a run computes; all ranks call `open`, `prepare`, `steps` and `finish` in this order."""

    name: ClassVar[str]
    kind: ClassVar[str]  # of its records
    title: ClassVar[str]  # on the leaderboard
    command: ClassVar[Command]
    cost_stage: ClassVar[str] = "probe"  # under which the board adds up its costs
    hub_task: ClassVar[str] = "image-classification"  # a model hub's name for it
    metrics: ClassVar[Sequence[Metric]] = ()  # in the order of the columns
    all_metrics_are_columns: ClassVar[bool] = False  # also those that `metrics` does not name
    may_change: Sequence[str] = ()  # keys that may change on resume
    hints: Mapping[str, str] = {}  # key → what to do if it was changed on purpose
    workers_key: ClassVar[str] = "DATA.NUM_WORKERS"
    what_ranks_change: ClassVar[str] = ""  # what differs on another number of processes
    keep: int = 2  # checkpoints
    resumes_without_checkpoint: ClassVar[bool] = False  # its state is in a cache, or it has none

    def __init__(self, cfg: CfgNode) -> None:
        self.cfg = cfg
        self.folder = Path(cfg.OUTPUT_DIR)
        self.inputs = Inputs({})
        self.run: Run  # set by the engine before `prepare`

    def explained(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which a failure that a user can fix becomes an error with its fix."""
        return explained(self.workers_key)

    def open(self) -> Inputs:
        """Open data and weights and return what they are; refuse all that can be refused."""
        raise NotImplementedError

    def name_of(self, role: str) -> str:
        """Return what the user calls an input: the key that names it, and its value."""
        return role

    def can_compare(self, record: Record) -> bool:
        """Return whether `open` is worth trying for a run that has ended with this record."""
        return True

    def names_the_same(self, record: Record) -> bool:
        """Return whether the config names the data and weights that the record's did."""
        raise NotImplementedError

    def recorded(self, record: Record) -> dict[str, Any]:
        """Return the identity of the inputs of a run that has ended."""
        return Inputs(record.data, record.inputs).identity()

    def prepare(self, saved: Mapping[str, Any]) -> None:
        """Build what the steps need, from what a checkpoint holds if there is one ({} if not).

        Nothing is written yet, and nothing of the checkpoint is kept.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds, on rank 0; all ranks call it."""
        raise NotImplementedError

    def steps(self) -> Iterator[int]:
        """Take steps; a `yield` of their number says that the state is complete.

        All ranks advance equally often.
        """
        raise NotImplementedError

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step."""
        raise NotImplementedError

    def finish(self) -> None:
        """Write what the run leaves; the record comes last."""
        raise NotImplementedError

    @classmethod
    def modules(cls) -> list[str]:
        """Return the modules whose code, with all that they import, makes its numbers."""
        return [cls.__module__, *(it for it in imported_modules() if it != cls.__module__)]

    @classmethod
    def info(cls, measured: Mapping[str, float] | None = None) -> TaskInfo:
        """Return what a record says about the task and its metrics."""
        known = [metric.name for metric in cls.metrics]
        more = [name for name in measured or () if cls.all_metrics_are_columns]
        further = [Metric(name, name) for name in more if name not in known]
        return TaskInfo(cls.name, cls.title, cls.cost_stage, cls.hub_task, [*cls.metrics, *further])


Registered = TypeVar("Registered", bound=type[Task])


class Command(NamedTuple):
    """How a suite runs a task."""

    module: str  # of the command
    prepared_by: str = ""  # the module of the command that makes its weights from a backbone
    trials: str = ""  # the option of the command that repeats it with further seeds
    labels: str = "DATA"  # the section of the keys FRACTION and DRAW
    longer: str = ""  # the key that makes its training longer; empty if nothing is trained


def task(
    name: str, *, title: str, kind: str = "", **how: str
) -> Callable[[Registered], Registered]:
    """Register a task; `kind` is that of its records if it is not its name, `how` see `Command`."""

    def register(found: Registered) -> Registered:
        packages = [base.__module__.partition(".")[0] for base in found.__mro__]
        command = next(COMMANDS[package] for package in packages if package in COMMANDS)
        found.name, found.title, found.kind = name, title, kind or name
        found.command = Command(command, **how)
        TASKS.register(name, found)
        return found

    return register


def _decorated(folder: str) -> Iterator[tuple[str, str, str, Command]]:
    """Yield (name, kind, module, command) of every task in a folder, without importing it."""
    for path in sorted((Path(kscl.__file__).resolve().parent.parent / folder).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        for name, more in re.findall(r'^@task\(\s*"(\w+)"(.*?)^class ', source, re.M | re.S):
            given = dict(re.findall(r'\b(\w+)="([^"]*)"', more))
            how = {key: given[key] for key in Command._fields if key in given}
            command = Command(COMMANDS[folder.partition("/")[0]], **how)
            yield name, given.get("kind", name), f"{folder.replace('/', '.')}.{path.stem}", command


_BUILT_IN = [found for folder in FOLDERS for found in _decorated(folder)]
TASKS: Registry[type[Task]] = Registry("task", {name: module for name, _, module, _ in _BUILT_IN})


def commands() -> dict[str, Command]:
    """Return how a suite runs the tasks of each kind of record, those of imported ones too."""
    known = {kind: command for _, kind, _, command in _BUILT_IN}
    return known | {found.kind: found.command for found in TASKS.loaded().values()}


def evaluation_kinds() -> tuple[str, ...]:
    """Return the kinds of records that evaluations write, those of imported tasks too."""
    return tuple(kind for kind in commands() if kind != PRETRAIN)
