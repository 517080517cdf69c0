"""`make setup`: quick the second time, and clear about what it cannot use."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT, run

SCRIPT = ROOT / "tools" / "setup_environment.py"


def test_a_finished_set_up_is_recognised_in_under_five_seconds():
    stamp = Path(sys.prefix) / "kscl-setup.stamp"
    if not stamp.exists():
        pytest.skip("this environment was not made by `make setup`")
    start = time.perf_counter()
    done = run("make", "setup", f"VENV={sys.prefix}")
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 5
    assert "installing" not in done.stdout


def test_a_python_that_is_too_old_is_refused_before_anything_is_made(tmp_path):
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\necho 3 8\n")
    old.chmod(0o755)
    done = run(sys.executable, SCRIPT, "--venv", tmp_path / "venv", "--python", old)
    assert done.returncode == 1
    assert "is Python 3.8" in done.stderr
    assert "PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_python_that_does_not_run_is_named(tmp_path):
    done = run(sys.executable, SCRIPT, "--venv", tmp_path / "venv", "--python", tmp_path / "no")
    assert done.returncode == 1
    assert "does not run" in done.stderr


def test_a_folder_that_is_not_an_environment_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    done = run(sys.executable, SCRIPT, "--venv", tmp_path)
    assert done.returncode == 1
    assert "left alone" in done.stderr
    assert (tmp_path / "thesis.tex").read_text() == "precious"
