"""Run stages: keep what is done; a stage that fails stops only those that need it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kscl.benchmark.suite.stages import BACKBONE_FILE, KEY_LENGTH, Stage
from kscl.errors import KsclError
from kscl.records.record import listed, one_line, wrong_places
from kscl.runtime.files import LOCK_FILE, is_locked, sha256_of, write_atomically
from kscl.runtime.logs import LOGGER
from kscl.runtime.machine import usable_cores
from kscl.runtime.processes import stop_requests

DONE, TO_DO, RUNNING, FAILED, WAITS = "done", "to do", "running", "failed", "not run"
STOPPED = "stopped"  # by Ctrl-C or a signal; the next start continues it
POLL_SECONDS = 0.2
SHOW_SECONDS = 1.0
SAY_THEIR_INPUTS = ("record.json", "certificate.json")  # of a run, and of a conversion
TERMINATION_PATIENCE = 60.0  # seconds for a stage to save what it has

log = logging.getLogger(LOGGER)


@dataclass
class State:
    """How far one stage is."""

    stage: Stage
    status: str
    seconds: float | None = None  # it took, or has taken so far
    expected: float | None = None  # what stages of its kind took before, or the suite's estimate
    log: Path | None = None
    is_outdated: bool = False  # a result before it is made again, and may differ


@dataclass(frozen=True)
class _Note:
    """What is kept on disk about a stage that is done."""

    key: str
    kind: str
    seconds: float


def look(stages: Sequence[Stage], state_dir: Path) -> list[State]:
    """Find what is done already, and how long the rest takes: as before, or as estimated.

    Name every damaged note; its stage is run again, and skips what it finds finished.
    """
    notes, damaged = _read_notes(state_dir)
    for path, reason in damaged.items():
        if not path.is_file():
            raise KsclError(f"{path}: A note about a stage must be a regular file. Delete it.")
        log.warning(
            "%s: The note about a finished stage is damaged (%s). If the stage is of this suite, "
            "it is run again; otherwise delete the file.",
            *(path, reason),
        )
    states = []
    gone: set[int] = set()  # stages whose result is made again, by identity
    for stage in stages:
        path = note_path(state_dir, stage)
        note = notes.get(path)
        is_known = note is not None and note.key == stage.key
        is_outdated = bool(gone.intersection(map(id, stage.needs)))
        # The leaderboard is quick and always made again.
        if stage.kind == "board" or not Path(stage.folder).exists() or is_outdated:
            gone.add(id(stage))
        status = DONE if is_known and id(stage) not in gone else TO_DO
        if (
            status == TO_DO
            and stage.kind != "board"
            and path not in damaged
            and any(state_dir.glob(f"{_base_name(stage)}-????????.json"))
        ):
            log.warning(
                "%s is run again: its settings, data or weights have changed, or its result or "
                "that of an earlier stage is gone.",
                stage.name,
            )
        states.append(
            State(
                stage,
                status,
                seconds=note.seconds if note and is_known else None,
                expected=stage.estimate and stage.estimate * stage.length,
                log=state_dir / f"{file_name(stage)}.log",
                is_outdated=is_outdated,
            )
        )
    _estimate(states)
    return states


def mark_running(states: Sequence[State]) -> None:
    """Mark the stages that another process is running: it holds their folder, or one in it."""
    for state in states:
        folder = Path(state.stage.folder)
        # Several trials or seeds have a folder each, one level down.
        locks = [folder / LOCK_FILE, *folder.glob(f"*/{LOCK_FILE}")]
        if state.status == TO_DO and any(is_locked(lock.parent) for lock in locks):
            state.status = RUNNING


def _estimate(states: list[State]) -> None:
    """Expect each stage to take what those of its kind and network took before, by its length."""
    took: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for state in states:
        stage = state.stage
        if state.status in (DONE, TO_DO) and state.seconds is not None:  # now, or before
            took.setdefault((stage.kind, stage.network), []).append((state.seconds, stage.length))
    for state in states:
        if found := took.get((state.stage.kind, state.stage.network)):
            seconds, lengths = map(sum, zip(*found, strict=True))
            state.expected = seconds / lengths * state.stage.length


def run_stages(
    states: list[State], state_dir: Path, show: Callable[[list[State]], None], jobs: int = 1
) -> int:
    """Run what is not done, `jobs` stages at a time.

    Return the exit code: that of a signal, 1 if any stage failed, or 0.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KsclError(
            f"{state_dir}: The folder cannot be made: {error.strerror}. Choose another output_dir."
        ) from error
    for state in states:
        if state.is_outdated:  # also if this call is stopped before its turn
            note_path(state_dir, state.stage).unlink(missing_ok=True)
    running: list[_Job] = []
    with stop_requests() as stop:
        try:
            while not stop:
                ready = _ready(states)
                running += [_begin(state, states, jobs) for state in ready[: jobs - len(running)]]
                if not running:
                    break
                show(states)
                _wait(running, stop)
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    _finish(job, state_dir)
                    _estimate(states)
        finally:
            for job in running:
                _end(job)
            show(states)
    if stop:
        return stop.exit_code
    return 1 if any(state.status in (FAILED, WAITS) for state in states) else 0


def _ready(states: list[State]) -> list[State]:
    """Return what can run now, and mark what no longer can; the board always can."""
    by_stage = {id(state.stage): state for state in states}
    ready = []
    for state in states:
        if state.status != TO_DO:
            continue
        needs = {by_stage[id(stage)].status for stage in state.stage.needs}
        if state.stage.kind != "board" and needs & {FAILED, WAITS}:
            state.status = WAITS
        elif not needs & {TO_DO, RUNNING}:
            ready.append(state)
    return ready


def program_path(name: str) -> str:
    """Return the console command of this installation, not another one that is on the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise KsclError(f"The command {name} is not installed here. Run `make setup`.")
    return found


@dataclass
class _Job:
    """A running stage."""

    state: State
    process: subprocess.Popen[bytes]
    start: float


def _begin(state: State, states: Sequence[State], jobs: int) -> _Job:
    stage = state.stage
    state.status, state.seconds = RUNNING, 0.0
    set_aside(stage, state.is_outdated)
    if stage.kind == "board":
        complete = not any(other.status in (FAILED, WAITS) for other in states)
        stage = of_what_exists(stage, complete)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    if jobs > 1:  # stages that run in parallel would compete with their threads
        environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // jobs)))
    assert state.log is not None
    try:
        with state.log.open("ab") as file:
            file.write(f"$ {' '.join(stage.command)}\n".encode())
            file.flush()
            process = subprocess.Popen(
                [*stage.runner, *stage.arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches us; we tell the stage to save and stop
                env=environment,
                preexec_fn=_end_with_suite if sys.platform == "linux" else None,
            )
    except OSError as error:
        raise KsclError(
            f"{state.log}: The log of a stage cannot be written: {error.strerror}. Free disk space "
            "or choose another output_dir; a new start continues here."
        ) from error
    return _Job(state, process, time.monotonic())


def of_what_exists(board: Stage, complete: bool) -> Stage:
    """Return the stage of a board that shows what there is: a stage before it may have failed.

    A board that lacks results stays out of a document that may have had all of them.
    """
    options = [it for it in board.options if complete or it[0] != "insert"]
    inputs = [folder for folder in board.inputs if Path(folder).exists()]
    inputs = inputs or [*board.inputs[:1]]  # without any, it would read those of other suites
    return replace(board, inputs=tuple(inputs), options=tuple(options))


def set_aside(stage: Stage, is_outdated: bool) -> None:
    """Rename a result that was made from another backbone: its tool would refuse to continue it.

    An outdated one is renamed too if nothing says what it was made from.
    """
    folder, backbone = Path(stage.folder), _backbone_of(stage)
    if backbone is None or not folder.is_dir():
        return
    records = [path for name in SAY_THEIR_INPUTS for path in folder.rglob(name)]
    if records and backbone.is_file():
        digest = sha256_of(backbone)
        is_outdated = not all(digest in path.read_text(errors="replace") for path in records)
    if is_outdated:
        number = 1
        while (old := folder.with_name(f"{folder.name}.old{number}")).exists():
            number += 1
        folder.rename(old)
        log.warning("%s was made from another backbone: it is kept as %s.", folder, old)


def _backbone_of(stage: Stage) -> Path | None:
    """Return the pretrained weights that a stage works on, or the stage that prepares them."""
    if (convert := stage.need("convert")) is not None:
        return _backbone_of(convert)
    pretrain = stage.need("pretrain")
    return (
        None if pretrain is None or stage.kind == "basis" else Path(pretrain.folder, BACKBONE_FILE)
    )


def _end_with_suite() -> None:
    """Let the system tell the stage's process to stop when the suite ends, even if killed."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(running: list[_Job], stop: object) -> None:
    """Wait until one ends, a stop is requested, or it is time to show how far they are."""
    until = time.monotonic() + SHOW_SECONDS
    while time.monotonic() < until and not stop:
        if any(job.process.poll() is not None for job in running):
            break
        time.sleep(POLL_SECONDS)
    for job in running:
        job.state.seconds = time.monotonic() - job.start


def _finish(job: _Job, state_dir: Path) -> None:
    state, stage = job.state, job.state.stage
    state.status = DONE if job.process.returncode == 0 else FAILED
    if state.status == DONE:
        seconds = round(time.monotonic() - job.start, 1)
        note = _Note(stage.key, stage.kind, seconds)
        write_atomically(note_path(state_dir, stage), json.dumps(vars(note)).encode())


def _end(job: _Job) -> None:
    """Ask the stage to save and stop, wait for it, then kill it."""
    job.state.status = STOPPED
    for number in (signal.SIGTERM, signal.SIGKILL):
        if job.process.poll() is None:
            os.killpg(job.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(TERMINATION_PATIENCE)


def _read_notes(state_dir: Path) -> tuple[dict[Path, _Note], dict[Path, str]]:
    """Return the notes by path, and for every damaged one the reason."""
    notes, damaged = {}, {}
    for path in sorted(state_dir.glob("*.json")):
        try:
            if not path.is_file():  # a pipe would be waited for
                raise ValueError("it is not a regular file")
            content = json.loads(path.read_text(encoding="utf-8"))
            if problems := list(wrong_places(content, _Note, "the note")):
                raise ValueError(listed(problems))
            if content["seconds"] < 0:
                raise ValueError(f"the note.seconds is {content['seconds']}, which is negative")
            notes[path] = _Note(**content)
        except OSError as error:
            damaged[path] = str(error.strerror)
        except (ValueError, RecursionError) as error:
            damaged[path] = one_line(str(error))
    return notes, damaged


def note_path(state_dir: Path, stage: Stage) -> Path:
    """Return the note that says a stage is done."""
    return state_dir / f"{file_name(stage)}.json"


def file_name(stage: Stage) -> str:
    """Return what the files about a stage are called, without their ending."""
    return f"{_base_name(stage)}-{stage.key[:KEY_LENGTH]}"


def _base_name(stage: Stage) -> str:
    return stage.name.replace("/", "_")
