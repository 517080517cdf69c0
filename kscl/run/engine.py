"""The engine that runs every task: acquire the folder, resume or start, iterate, save, finish.

A run is one folder, one config, one seed and one group of processes. A task (pretraining, a probe,
a detector) says what is computed; the engine answers "may this folder be resumed?", saves when it
is due and when a signal asks for it, and writes nothing before all that can be refused has been.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from kscl.backbone_file import read_plain
from kscl.cli import WORLD_SIZE_OPTION
from kscl.config import CONFIG_FILE, config_values, leaves_without, read_mapping, save_config
from kscl.errors import ConfigError, KsclError
from kscl.records.provenance import loaded_code
from kscl.records.record import RECORD_FILE, RecordError, read_record
from kscl.registry import import_modules
from kscl.run.checkpoint import (
    CHECKPOINT_FOLDER,
    load_newest,
    remove_unfinished,
    save_checkpoint,
    step_of,
)
from kscl.run.task import Task
from kscl.runtime.distributed import LateVote, any_rank, on_first_rank, rank, world_size
from kscl.runtime.files import only_run_in
from kscl.runtime.launch import launch
from kscl.runtime.logs import LOGGER, set_up_logging
from kscl.runtime.processes import StopRequest, stop_requests

log = logging.getLogger(LOGGER)

LEFT_BY_A_START = ("log.", "tensorboard", "events.out.")  # logs of our tools and of Detectron2
WORLD_SIZE, WORLD_SIZES = "world_size", "world_sizes"  # entries of a checkpoint


class Stopped(Exception):
    """The run was asked to stop; its last checkpoint is on disk."""


@dataclass
class Run:
    """A run under way, as its task sees it."""

    task: Task
    stop: StopRequest
    resumed_from: Path | None = None  # a checkpoint
    seconds_before: float = 0.0
    world_sizes: list[list[int]] = field(default_factory=list)  # [first step, processes]
    began: float = field(default_factory=time.monotonic)
    last_saved: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Return the seconds of work so far, over all restarts."""
        return self.seconds_before + time.monotonic() - self.began

    def save(self, step: int) -> None:
        """Write a checkpoint; all ranks call this."""
        state = self.task.state_dict()
        if rank() == 0:
            content = {
                "config": config_values(self.task.cfg),
                "inputs": self.task.inputs.identity(),
                "data": self.task.inputs.data,
                "seconds": self.seconds,
                WORLD_SIZE: world_size(),
                WORLD_SIZES: self.world_sizes,
                **state,
            }
            save_checkpoint(self.task.folder / CHECKPOINT_FOLDER, step, content, self.task.keep)
        self.last_saved = time.monotonic()

    def leave_if_stopped(self) -> None:
        """Leave without saving if any rank was asked to stop; all ranks call this together."""
        if any_rank(bool(self.stop)):
            log.info("Stopped on request. --resume continues from the last checkpoint.")
            raise Stopped

    def on_first_rank(self, steps: Callable[[], Iterator[int]]) -> None:
        """Take steps on rank 0 alone, saving as usual, while the other ranks wait."""

        def work() -> bool:
            try:
                for step in steps():
                    self.maybe_save(step, bool(self.stop))
            except Stopped:
                return True
            return False

        if on_first_rank(work):
            raise Stopped

    def maybe_save(self, step: int, stopping: bool) -> None:
        """Save if it is due; save and leave if the run was asked to stop."""
        assert isinstance(step, int), f"{type(self.task).__name__} must yield step numbers"
        if stopping or self.task.is_due(step):
            self.save(step)
        if stopping:
            log.info("Stopped on request. Step %d is saved; --resume continues from it.", step)
            raise Stopped


@dataclass(frozen=True)
class Flags:
    """The options for a folder that already contains a run."""

    resume: bool = False
    auto_resume: bool = False
    allow_world_size_change: bool = False


def seed_configs(cfg: CfgNode, count: int) -> list[CfgNode]:
    """Return the config, or one for each of `count` seeds in folders seed0, seed1, …; frozen."""
    configs = []
    for number in range(max(1, count)):
        each = cfg.clone()
        each.defrost()
        if count:
            each.SEED = cfg.SEED + number
            each.OUTPUT_DIR = str(Path(cfg.OUTPUT_DIR) / f"seed{each.SEED}")
        each.freeze()
        configs.append(each)
    return configs


def launch_run(task: Callable[[CfgNode], Task], cfg: CfgNode, flags: Flags, num_gpus: int) -> int:
    """Run a task on `num_gpus` processes of this machine; return the exit code."""
    return launch(_run_config, (task, cfg, flags), num_gpus)


def _run_config(job: tuple[Callable[[CfgNode], Task], CfgNode, Flags]) -> int:
    import_modules()  # in a process that was spawned
    task, cfg, flags = job
    return run(task(cfg), flags)


def run(task: Task, flags: Flags) -> int:
    """Do this rank's part of a run, from acquiring its folder to its record.

    Return the exit code.
    """
    loaded_code()  # what is edited from here on does not make this run's numbers
    set_up_logging(rank=rank())
    with task.explained(), contextlib.ExitStack() as held, stop_requests() as stop:
        path, saved = acquire(task, flags, held)
        if os.path.lexists(task.folder / RECORD_FILE):  # a dangling link is no record either
            check_ended(task)
            log.info("This run has ended: %s.", task.folder / RECORD_FILE)
            return 0
        task.run = Run(task, stop, path)
        task.inputs = task.open()
        if path is not None:
            refuse_other_inputs(task, saved["inputs"], task.inputs.identity(), path)
            task.run.seconds_before = saved["seconds"]
        task.run.world_sizes = world_sizes(task, path, saved)
        task.prepare(saved)
        saved.clear()  # a checkpoint is as large as the network
        # The config is written first: it says whose folder this is.
        on_first_rank(lambda: save_config(task.cfg, task.folder))
        set_up_logging(task.folder, rank())
        if path is not None:
            log.info("Resuming after step %d from %s.", step_of(path), path)
        try:
            iterate(task)
            task.finish()
        except Stopped:
            return stop.exit_code
    return 0


def iterate(task: Task) -> None:
    """Take all steps; raise `Stopped` after a request to stop, once the state is on disk."""
    vote = LateVote()
    try:
        for step in task.steps():
            task.run.maybe_save(step, vote.hold(bool(task.run.stop)))
    finally:
        vote.close()


def acquire(
    task: Task, flags: Flags, held: contextlib.ExitStack
) -> tuple[Path | None, dict[str, Any]]:
    """Hold the folder until the run ends; return the checkpoint to resume from, read once."""
    content: dict[str, Any] = {}

    def on_rank_0() -> Path | None:
        held.enter_context(only_run_in(task.folder))
        path, found = find_start(task, flags) or (None, {})
        content.update(found)
        return path

    path = on_first_rank(on_rank_0)
    return path, content if path is None or content else read_plain(path)


def find_start(task: Task, flags: Flags) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint to resume from and its content, or None to start.

    Raise an error if neither is right.
    """
    folder, now = task.folder, config_values(task.cfg)
    # Hidden are the lock and the unfinished files of a killed process.
    content = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if content and CONFIG_FILE not in content:
        raise KsclError(
            f"OUTPUT_DIR {folder} was not created by this tool ({len(content)} entries, e.g. "
            f"{content[0]}). Choose another."
        )
    is_run = any(not _is_of_a_start(folder / name) for name in content)
    if is_run and not (flags.resume or flags.auto_resume):
        raise KsclError(
            f"OUTPUT_DIR {folder} holds a run already. Resume it with --resume, or choose another."
        )
    checkpoints = folder / CHECKPOINT_FOLDER
    remove_unfinished(checkpoints)
    newest = load_newest(checkpoints)
    has_ended = RECORD_FILE in content
    if newest is not None:
        path, saved = newest
        before = dict(saved.get("config", {}))
        if not (flags.allow_world_size_change or has_ended):
            before[WORLD_SIZE], now[WORLD_SIZE] = saved.get(WORLD_SIZE), world_size()
        refuse_changes(before, now, path, task)
        return newest
    began = is_run or (task.resumes_without_checkpoint and CONFIG_FILE in content)
    if flags.resume and not began:
        raise KsclError(
            f"There is nothing to resume in {folder}. --auto-resume starts a run if there is none."
        )
    if is_run:
        refuse_changes(_read_config(folder / CONFIG_FILE), now, folder, task)
        if not (has_ended or task.resumes_without_checkpoint):
            log.warning("The run in %s has no checkpoint: it starts from the beginning.", folder)
    return None


def check_ended(task: Task) -> None:
    """Raise if the run that has ended here had other settings, data or weights than are named.

    The recorded paths may no longer exist or may be remote; the comparison is then skipped.
    """
    path = task.folder / RECORD_FILE
    try:
        record = read_record(path)
    except RecordError as error:
        raise KsclError(f"{error} Delete it to run again, or choose another OUTPUT_DIR.") from error
    refuse_changes(record.config.values, config_values(task.cfg), task.folder, task)
    if not task.can_compare(record):
        return
    try:
        now = task.open().identity()
    except (KsclError, OSError, SystemExit):  # the latter on ranks whose rank 0 has the error
        if task.names_the_same(record):
            return
        raise
    refuse_other_inputs(task, task.recorded(record), now, task.folder)


def refuse_other_inputs(
    task: Task, before: Mapping[str, Any], now: Mapping[str, Any], where: Path
) -> None:
    """Raise an error that names the data or weights that are not those of the run."""
    changed = [role for role in now if role in before and before[role] != now[role]]
    if changed:
        lines = "".join(
            f"\n  {task.name_of(role)}: {before[role]} then, {now[role]} now" for role in changed
        )
        raise KsclError(
            f"{where} was made from other inputs:{lines}\nRestore them, or start a new run in "
            "another OUTPUT_DIR."
        )


def refuse_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], where: Path, task: Task
) -> None:
    """Raise an error that names every setting that differs and changes results."""
    changes = changed_keys(before, now, task.may_change)
    if not changes:
        return
    option = f"{WORLD_SIZE_OPTION} resumes on another number of processes; the record says so."
    hints = {WORLD_SIZE: f"{option} {task.what_ranks_change}".strip(), **task.hints}
    lines = "".join(f"\n  {key}: {old!r} before, {new!r} now" for key, old, new in changes)
    advice = "".join(f" {hints[key]}" for key, _, _ in changes if hints.get(key))
    raise KsclError(
        f"{where} was made with other settings, so it cannot be resumed with these:{lines}\n"
        f"Restore them, or start a new run in another OUTPUT_DIR.{advice}"
    )


def changed_keys(
    before: Mapping[str, Any], now: Mapping[str, Any], may_change: Sequence[str] = ()
) -> list[tuple[str, object, object]]:
    """Return (key, old value, new value) of every setting that differs and matters."""
    old, new = leaves_without(before, may_change), leaves_without(now, may_change)
    keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    return [(key, old.get(key), new.get(key)) for key in keys]


def world_sizes(task: Task, path: Path | None, saved: Mapping[str, Any]) -> list[list[int]]:
    """Return [first step, processes] of every part of the run, with the one that begins now."""
    parts = [list(part) for part in saved.get(WORLD_SIZES, [])]
    now, step = world_size(), 0 if path is None else step_of(path)
    if parts and parts[-1][1] != now:
        log.warning(
            "Resuming with %d processes; until step %d there were %d. %s",
            *(now, step, parts[-1][1], task.what_ranks_change),
        )
    if not parts or parts[-1][1] != now:
        parts.append([step, now])
    return parts


def _is_of_a_start(path: Path) -> bool:
    """Return whether a start that ended before its first step could have left this behind.

    Such a start must not block the corrected command.
    """
    if path.name == CONFIG_FILE or path.name.startswith(LEFT_BY_A_START):
        return True
    is_empty_file = path.is_file() and path.stat().st_size == 0
    return is_empty_file or (path.is_dir() and not any(path.iterdir()))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = read_mapping(path)
    except ConfigError as error:
        raise KsclError(f"{error} Choose another OUTPUT_DIR.") from error
    if not values:
        raise KsclError(f"{path} is not the config of a run. Choose another OUTPUT_DIR.")
    return values
