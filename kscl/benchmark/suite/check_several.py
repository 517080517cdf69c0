"""Run many checks in few processes: their libraries take longer to import than most checks take.

Each process runs the tools' own console commands, one after the other, and answers with one line of
JSON per check. A check whose process ended without an answer runs again in a process of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE
from typing import Any

from kscl.benchmark.suite.execute import program_path

TIMEOUT = 1800.0  # seconds of one check; a preflight decodes thousands of images
DETECTION = ("kscl-convert", "kscl-train-net")
ENVIRONMENT = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}

Command = tuple[str, ...]
Said = tuple[str, str]  # on stdout and on stderr


def run_checks(commands: Sequence[Command], processes: int) -> Iterator[tuple[Command, Said]]:
    """Run the commands; yield each with what it said, as they end."""
    # One tool's stay together, and those that import Detectron2.
    alike = sorted(commands, key=lambda command: (command[0] not in DETECTION, command[0]))
    count = max(1, min(processes, len(alike)))
    parts = [alike[i * len(alike) // count : (i + 1) * len(alike) // count] for i in range(count)]
    ended: queue.SimpleQueue[tuple[Command, Said] | BaseException] = queue.SimpleQueue()
    children = Children()

    def run(part: Sequence[Command]) -> None:
        try:
            for answer in _in_one_process(part, children):
                ended.put(answer)
        except BaseException as error:  # the other thread waits for an answer, so give it this one
            ended.put(error)

    with ThreadPoolExecutor(count) as threads, children:
        for part in parts:
            threads.submit(run, part)
        for _ in alike:
            answer = ended.get()
            if isinstance(answer, BaseException):
                raise answer
            yield answer


class Children:
    """The processes of the checks: Ctrl-C, which reaches this process alone, ends them all."""

    def __init__(self) -> None:
        self.running: set[subprocess.Popen[str]] = set()
        self.stopped = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.stopped = True
        for process in tuple(self.running):
            _end(process)

    @contextlib.contextmanager
    def start(self, command: Sequence[str], **pipes: Any) -> Iterator[subprocess.Popen[str]]:
        """Start a process in a session of its own; end it and what it started in the end."""
        environment = {**os.environ, **ENVIRONMENT}
        process = subprocess.Popen(
            command, text=True, env=environment, start_new_session=True, **pipes
        )
        self.running.add(process)
        try:
            if self.stopped:
                _end(process)
            yield process
        finally:
            _end(process)
            process.wait()
            self.running.discard(process)


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _in_one_process(
    commands: Sequence[Command], children: Children
) -> Iterator[tuple[Command, Said]]:
    left = list(commands)
    if len(left) > 1:
        pipes = {"stdin": PIPE, "stdout": PIPE, "stderr": subprocess.DEVNULL}
        with children.start([sys.executable, "-m", __name__], **pipes) as process:
            timer = threading.Timer(TIMEOUT * len(left), _end, [process])
            timer.start()
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps([[program_path(c[0]), *c[1:]] for c in left]))
                process.stdin.close()
            try:
                for line in process.stdout:
                    said, errors = json.loads(line)
                    yield left.pop(0), (said, errors)
            finally:
                timer.cancel()
    for command in left:
        if children.stopped:
            return
        yield command, _alone(command, children)


def _alone(command: Command, children: Children) -> Said:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": PIPE, "stderr": PIPE}
    with children.start([program_path(command[0]), *command[1:]], **pipes) as process:
        try:
            said, errors = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            words = " ".join(command)
            return "", f"The check took more than {TIMEOUT:.0f} s. Its command: {words}."
    return said, errors or f"exit code {process.returncode}"


def main() -> None:
    """Run the commands that stdin lists; write what each said as a line of JSON."""
    commands = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what a library writes past sys.stdout is not taken for an answer
        for command in commands:
            said, errors = io.StringIO(), io.StringIO()
            sys.argv = command
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
                try:
                    runpy.run_path(command[0], run_name="__main__")
                except SystemExit as end:
                    errors.write("" if errors.getvalue() else f"exit code {end.code}")
                except Exception:
                    traceback.print_exc()
            print(json.dumps([said.getvalue(), errors.getvalue()]), file=answers, flush=True)


if __name__ == "__main__":
    main()
