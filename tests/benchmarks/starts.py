"""Figures of starts: what a command takes before or without any work of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import yaml

from tests.benchmarks.harness import figure, seconds
from tests.helpers.commands import ROOT

SUITE = {
    "name": "starts",
    "output_dir": "output",
    "shapes": {"output_dir": "datasets/shapes", "num_classes": 3, "unlabeled": 32},
    "contenders": {"random": {"arch": "resnet18", "kwargs": {"channels": [8, 8, 16, 16]}}},
    "evaluations": {"knn": {"config": "linear_eval/shapes_knn.yaml"}},
}


def kscl(*words: object, cwd: Path = ROOT) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "kscl", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=cwd, env=environment, check=True, capture_output=True)


def cpu_seconds(*words: object, cwd: Path = ROOT) -> float:
    """Return the CPU time of a command and its processes; other programs do not count."""
    before = os.times()
    kscl(*words, cwd=cwd)
    after = os.times()
    return after.children_user + after.children_system - before[2] - before[3]


@cache
def finished() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of a suite that has run to its end."""
    folder = tempfile.TemporaryDirectory(prefix="kscl-starts-")
    Path(folder.name, "suite.yaml").write_text(yaml.safe_dump(SUITE))
    kscl("run", "suite.yaml", cwd=Path(folder.name))
    return folder


@figure("start_help", "CPU time of kscl --help", at_most=1, unit=" s")
def start_help() -> float:
    return cpu_seconds("--help")


@figure("start_board", "CPU time of kscl board on results/ (all submissions)", at_most=1, unit=" s")
def start_board() -> float:
    with tempfile.TemporaryDirectory() as folder:
        return cpu_seconds("board", "results", "--output-dir", folder)


@figure("start_finished_suite", "CPU time of kscl run on a finished suite", at_most=1, unit=" s")
def start_finished_suite() -> float:
    return cpu_seconds("run", "suite.yaml", cwd=Path(finished().name))


@figure("start_cached_probe", "a kNN probe whose features are cached", at_most=3, unit=" s")
def start_cached_probe() -> float:
    folder = Path(finished().name)
    config = next(folder.glob("output/random/**/knn*/config.yaml"))
    words = ("probe", "--config-file", config, "OUTPUT_DIR", "again")
    return seconds(lambda: kscl(*words, cwd=folder))


@figure("start_demo_checks", "checks of every stage of the demo suite", at_most=8, unit=" s")
def start_demo_checks() -> float:
    with tempfile.TemporaryDirectory() as folder:
        demo = ROOT / "configs/suites/demo.yaml"
        return seconds(lambda: kscl("run", demo, "--dry-run", cwd=Path(folder)))
