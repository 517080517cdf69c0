"""Running stages: what is done is kept, and what fails stops only what needs it."""

from __future__ import annotations

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

from kscl.errors import KsclError
from kscl.files import write_atomically
from kscl.signals import stop_requests
from kscl.suite.stages import KEY_LENGTH, Stage

DONE, TO_DO, RUNNING, FAILED, WAITS = "done", "to do", "running", "failed", "not run"
POLL_SECONDS = 0.2
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
    for state in states:
        state.expected = _expected(state.stage.kind, state_dir)
    return states


def run_stages(states: list[State], state_dir: Path, show: Callable[[list[State]], None]) -> int:
    """Run what is not done; the exit code is that of a signal, 1 if any stage failed, or 0."""
    by_stage = {id(state.stage): state for state in states}
    state_dir.mkdir(parents=True, exist_ok=True)
    with stop_requests() as stop:
        for state in states:
            if state.status == DONE:
                continue
            needs = [by_stage[id(stage)] for stage in state.stage.needs]
            waits_for = [need for need in needs if need.status != DONE]
            if waits_for and state.stage.kind != "board":
                state.status = WAITS
                show(states)
                continue
            _run(state, state_dir, lambda: show(states), stop)
            show(states)
            if stop:
                return stop.exit_code
    return 1 if any(state.status in (FAILED, WAITS) for state in states) else 0


def program_path(name: str) -> str:
    """The console command of this very installation, not another one that is on the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise KsclError(f"the command {name} is not installed here: run `make setup`")
    return found


def _run(state: State, state_dir: Path, show: Callable[[], None], stop: object) -> None:
    stage = state.stage
    start = time.monotonic()
    state.status, state.seconds = RUNNING, 0.0
    show()
    # Only the leaderboard runs when a stage before it failed: it is made of the others.
    missing = {need.folder for need in stage.needs if not Path(need.folder).exists()}
    arguments = [word for word in stage.arguments if word not in missing]
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
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        try:
            _wait(process, state, start, show, stop)
        except BaseException:
            _end(process)
            raise
    state.seconds = time.monotonic() - start
    if process.returncode == 0 and not stop:
        state.status = DONE
        note = {"key": stage.key, "kind": stage.kind, "seconds": round(state.seconds, 1)}
        write_atomically(_note_path(state_dir, stage), json.dumps(note).encode())
    else:
        state.status = FAILED


def _wait(
    process: subprocess.Popen[bytes],
    state: State,
    start: float,
    show: Callable[[], None],
    stop: object,
) -> None:
    shown = start
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        state.seconds = time.monotonic() - start
        if time.monotonic() - shown > 1.0:
            shown = time.monotonic()
            show()
        if stop:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the stage to save and stop, and wait for it; then insist."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(TERMINATION_PATIENCE)
            except subprocess.TimeoutExpired:
                continue


def _result_is_there(stage: Stage) -> bool:
    """A result that was deleted since is none; the leaderboard is quick and always made anew."""
    return stage.kind != "board" and Path(stage.folder).exists()


def _expected(kind: str, state_dir: Path) -> float | None:
    notes = (json.loads(path.read_text()) for path in sorted(state_dir.glob("*.json")))
    seconds = [note["seconds"] for note in notes if note["kind"] == kind]
    return sum(seconds) / len(seconds) if seconds else None


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
