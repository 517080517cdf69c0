"""Running stages: what is done is kept, and what fails stops only what needs it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kscl.benchmark.suite.stages import KEY_LENGTH, Stage
from kscl.errors import KsclError
from kscl.runtime.files import write_atomically
from kscl.runtime.machine import usable_cores
from kscl.runtime.signals import stop_requests

DONE, TO_DO, RUNNING, FAILED, WAITS = "done", "to do", "running", "failed", "not run"
POLL_SECONDS = 0.2
SHOW_SECONDS = 1.0
TERMINATION_PATIENCE = 60.0  # seconds for a stage to save what it has


@dataclass
class State:
    """Where one stage stands."""

    stage: Stage
    status: str
    seconds: float | None = None  # it took, or has taken so far
    expected: float | None = None  # by what stages of its kind took before
    log: Path | None = None


def look(stages: Sequence[Stage], state_dir: Path) -> list[State]:
    """What is done already, and how long the rest may take."""
    states = []
    for stage in stages:
        note = _read_note(state_dir, stage)
        is_done = note is not None and _result_is_there(stage)
        log = state_dir / f"{_file_name(stage)}.log"
        status = DONE if is_done else TO_DO
        states.append(State(stage, status, note["seconds"] if note else None, None, log))
    expect(states, state_dir)
    return states


def expect(states: list[State], state_dir: Path) -> None:
    """How long each may take: the mean of what stages of its kind took before."""
    took: dict[str, list[float]] = {}
    for path in sorted(state_dir.glob("*.json")):
        note = json.loads(path.read_text())
        took.setdefault(note["kind"], []).append(note["seconds"])
    for state in states:
        seconds = took.get(state.stage.kind)
        state.expected = sum(seconds) / len(seconds) if seconds else None


def run_stages(
    states: list[State], state_dir: Path, show: Callable[[list[State]], None], jobs: int = 1
) -> int:
    """Run what is not done, so many stages at a time.

    The exit code is that of a signal, 1 if any stage failed, or 0.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    running: list[_Job] = []
    with stop_requests() as stop:
        try:
            while not stop:
                ready = _ready(states)
                running += [_begin(state, jobs) for state in ready[: jobs - len(running)]]
                if not running:
                    break
                show(states)
                _wait(running, stop)
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    _finish(job, state_dir)
                    expect(states, state_dir)
        finally:
            for job in running:
                _end(job)
            show(states)
    if stop:
        return stop.exit_code
    return 1 if any(state.status in (FAILED, WAITS) for state in states) else 0


def _ready(states: list[State]) -> list[State]:
    """What can run now; what no longer can is marked. The board can: it shows what there is."""
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
    """The console command of this very installation, not another one that is on the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise KsclError(f"the command {name} is not installed here: run `make setup`")
    return found


@dataclass
class _Job:
    """A stage that runs."""

    state: State
    process: subprocess.Popen[bytes]
    start: float


def _begin(state: State, jobs: int) -> _Job:
    stage = state.stage
    state.status, state.seconds = RUNNING, 0.0
    # Only the leaderboard runs when a stage before it failed: it is made of the others.
    missing = {need.folder for need in stage.needs if not Path(need.folder).exists()}
    arguments = [word for word in stage.arguments if word not in missing]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    if jobs > 1:  # threads of stages that run side by side would be in each other's way
        environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // jobs)))
    assert state.log is not None
    with state.log.open("ab") as log:
        log.write(f"$ {' '.join(stage.command)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            [program_path(stage.program), *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches us; we tell the stage to save and stop
            env=environment,
            preexec_fn=_end_with_suite if sys.platform == "linux" else None,
        )
    return _Job(state, process, time.monotonic())


def _end_with_suite() -> None:
    """In the stage's process: be told to stop when the suite is gone, even if it was killed."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(running: list[_Job], stop: object) -> None:
    """Until one ends, we are asked to stop, or it is time to show how far they are."""
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
        note = {"key": stage.key, "kind": stage.kind, "seconds": seconds}
        write_atomically(_note_path(state_dir, stage), json.dumps(note).encode())


def _end(job: _Job) -> None:
    """Ask the stage to save and stop, and wait for it; then insist."""
    job.state.status = FAILED
    for number in (signal.SIGTERM, signal.SIGKILL):
        if job.process.poll() is None:
            os.killpg(job.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(TERMINATION_PATIENCE)


def _result_is_there(stage: Stage) -> bool:
    """A result that was deleted since is none; the leaderboard is quick and always made anew."""
    return stage.kind != "board" and Path(stage.folder).exists()


def _read_note(state_dir: Path, stage: Stage) -> dict[str, float] | None:
    path = _note_path(state_dir, stage)
    if not path.is_file():
        return None
    note = json.loads(path.read_text())
    return note if note["key"] == stage.key else None


def _note_path(state_dir: Path, stage: Stage) -> Path:
    return state_dir / f"{_file_name(stage)}.json"


def _file_name(stage: Stage) -> str:
    return f"{stage.name.replace('/', '_')}-{stage.key[:KEY_LENGTH]}"
