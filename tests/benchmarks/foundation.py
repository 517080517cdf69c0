"""Figures of the environment itself."""

from __future__ import annotations

import subprocess
import sys

from tests.benchmarks.harness import figure, seconds
from tests.helpers.commands import ROOT


@figure("setup_again", "`make setup` when there is nothing to do", at_most=5, unit=" s")
def setup_again() -> float:
    command = ["make", "setup", f"VENV={sys.prefix}"]
    return seconds(lambda: subprocess.run(command, cwd=ROOT, check=True, capture_output=True))
