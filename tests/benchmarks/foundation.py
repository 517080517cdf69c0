"""Figures of the environment itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.benchmarks.harness import SkippedError, figure, seconds
from tests.commands import ROOT


@figure("setup_again", "`make setup` when there is nothing to do", at_most=5, unit=" s")
def setup_again() -> float:
    if not (Path(sys.prefix) / "kscl-setup.stamp").exists():
        raise SkippedError("this environment was not made by `make setup`")
    command = ["make", "setup", f"VENV={sys.prefix}"]
    return seconds(lambda: subprocess.run(command, cwd=ROOT, check=True, capture_output=True))
