"""Ctrl-C in a suite: it says how to continue, and no stage is called failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.chain import TINY_SHAPES, smoke_suite
from tests.helpers.commands import ROOT
from tests.kscl.benchmark.suite.test_suite import next_log

pytestmark = pytest.mark.full


def hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background process may ignore them


def test_a_suite_that_is_interrupted_while_it_checks_stops_at_once_with_its_checks(tmp_path):
    suite = smoke_suite(tmp_path)
    command = [sys.executable, "-W", "ignore", "tools/run_suite.py", str(suite)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        command, cwd=ROOT, preexec_fn=hear_interrupts, start_new_session=True, **pipes
    )
    line = process.stderr.readline()
    while "Checking the stages" not in line:
        line = process.stderr.readline()
    while not (checks := children_of(process.pid)):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, out + err
    assert out.splitlines()[-1] == "Stopped. Run it again to continue."
    assert "Traceback" not in out + err
    assert not any(Path(f"/proc/{check}").exists() for check in checks)


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_an_interrupted_suite_says_how_to_continue_and_calls_no_stage_failed(tmp_path):
    data = {"output_dir": str(tmp_path / "shapes"), **TINY_SHAPES, "unlabeled": 100_000}
    suite = smoke_suite(tmp_path, shapes=data)
    command = [sys.executable, "-W", "ignore", "tools/run_suite.py", str(suite), "--skip-check"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, preexec_fn=hear_interrupts, **pipes)
    log = next_log(tmp_path, "shapes")
    while process.poll() is None and not log():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    assert out.splitlines()[-1] == "Stopped. Run it again to continue."
    assert "shapes: stopped" in out
    assert "failed" not in out
    assert "Traceback" not in out + err
    assert not list((tmp_path / "output/.stages").glob("*.json"))
