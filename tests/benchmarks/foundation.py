"""Figures of the environment itself."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.harness import SkippedError, figure, seconds
from tests.helpers.commands import ROOT


@figure("setup_again", "`make setup` when there is nothing to do", at_most=5, unit=" s")
def setup_again() -> float:
    venv = Path(sys.prefix)
    stamp, script = venv / "kscl-setup.stamp", runpy.run_path(f"{ROOT}/tools/setup_environment.py")
    if not stamp.exists() or stamp.read_text() != script["stamp_key"](venv):
        raise SkippedError("this environment was not made by `make setup` in this folder")
    command = ["make", "setup", f"VENV={sys.prefix}"]
    return seconds(lambda: subprocess.run(command, cwd=ROOT, check=True, capture_output=True))
