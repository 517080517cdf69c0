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
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

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

    def run(part: Sequence[Command]) -> None:
        try:
            for answer in _in_one_process(part):
                ended.put(answer)
        except BaseException as error:  # the other thread waits for an answer, so give it this one
            ended.put(error)

    with ThreadPoolExecutor(count) as threads:
        for part in parts:
            threads.submit(run, part)
        for _ in alike:
            answer = ended.get()
            if isinstance(answer, BaseException):
                raise answer
            yield answer


def _in_one_process(commands: Sequence[Command]) -> Iterator[tuple[Command, Said]]:
    left = list(commands)
    if len(left) > 1:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        timer = threading.Timer(TIMEOUT * len(left), process.kill)
        timer.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps([[program_path(c[0]), *c[1:]] for c in left]))
                process.stdin.close()
            for line in process.stdout:
                said, errors = json.loads(line)
                yield left.pop(0), (said, errors)
        finally:
            timer.cancel()
            process.kill()
            process.wait()
    for command in left:
        yield command, _alone(command)


def _alone(command: Command) -> Said:
    try:
        done = subprocess.run(
            [program_path(command[0]), *command[1:]],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **ENVIRONMENT},
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        words = " ".join(command)
        return "", f"The check took more than {TIMEOUT:.0f} s. Its command: {words}."
    return done.stdout, done.stderr or f"exit code {done.returncode}"


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
