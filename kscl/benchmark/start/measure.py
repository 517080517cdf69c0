"""Measure what stages cost on this machine: the tools themselves, a few steps each."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kscl.benchmark.start.choose import (
    Costs,
    Sizes,
    detection_overrides,
    epoch_steps,
    kscl_overrides,
    pretrain_overrides,
    probe_overrides,
)
from kscl.benchmark.start.facts import Facts
from kscl.benchmark.suite.execute import program_path
from kscl.benchmark.suite.spec import override_words
from kscl.errors import KsclError
from kscl.records.record import RECORD_FILE, read_record

MEASURED_STEPS = 24
MEASURED_ITERATIONS = 12
PRECISE_BN_ITERATIONS = 20  # forward passes at the end of a fine-tuning, a third of the work each
PRETRAIN, DETECTION = "pretrain/bccd_moco.yaml", "detection/bccd_tiny_c4.yaml"
LINEAR, KNN = "linear_eval/shapes.yaml", "linear_eval/shapes_knn.yaml"
RANDOM = ("random", "--arch", "resnet50", "--arch-kwargs")
CHANNELS = "{channels: [8, 16, 32, 64], zero_init_last: true}"


def measure(facts: Facts, sizes: Sizes, cores: int) -> Costs:
    """Run every kind of stage for a moment; return the seconds of their parts.

    They run side by side as the stages of the suite will, so they slow each other down as those
    do. The seconds are processor time, which another program that is busy just now does not change.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kscl-start-") as name,
        ThreadPoolExecutor(max(1, min(cores, 2))) as threads,
    ):
        folder = Path(name)
        steps = {"SOLVER.MAX_STEPS": MEASURED_STEPS, "SOLVER.WARMUP_EPOCHS": 0}
        steps |= {"DATA.NUM_WORKERS": 0}  # in one process, whose time is divided below
        moco = pretrain_overrides(facts, sizes, 1) | steps
        kscl = moco | kscl_overrides(1) | steps
        of_detection = threads.submit(_detection, folder, facts, sizes)
        of_moco = threads.submit(_pretraining, folder / "moco", moco)
        of_kscl = threads.submit(_pretraining, folder / "kscl", kscl)
        of_probe = threads.submit(_probe, folder / "probe", facts)
        start, moco_step, slowdown = of_moco.result()
        kscl_step = max(moco_step, of_kscl.result()[1])  # more views per image never cost less
        epoch = epoch_steps(facts)
        return Costs(
            start,
            epoch * moco_step,
            epoch * kscl_step,
            *of_detection.result(),
            of_probe.result(),
            slowdown=slowdown,
        )


def _probe(folder: Path, facts: Facts) -> float:
    if facts.classes is None:
        return 0.0
    network = {"BACKBONE.WEIGHTS": "random", "BACKBONE.NAME": "resnet50"}
    network |= {"BACKBONE.KWARGS": CHANNELS, "OUTPUT_DIR": str(folder)}
    words = override_words({**probe_overrides(facts), **network})
    return run_measured("kscl-linear-eval", ["--config-file", LINEAR, *words]).work


def _pretraining(folder: Path, overrides: dict[str, Any]) -> tuple[float, float, float]:
    """Return the seconds of all of a pretraining but its steps, of a step, and the slowdown."""
    words = override_words({**overrides, "OUTPUT_DIR": str(folder)})
    spent = run_measured("kscl-pretrain", ["--config-file", PRETRAIN, *words])
    trained = spent.work_of(read_record(folder / RECORD_FILE)["seconds"])
    return spent.work - trained, trained / MEASURED_STEPS, spent.clock / spent.work


def _detection(folder: Path, facts: Facts, sizes: Sizes) -> tuple[float, float, float]:
    """Return the seconds of a conversion, of all of a fine-tuning but its steps, and of a step."""
    if facts.boxes is None:
        return 0.0, 0.0, 0.0
    converted, output = folder / "converted", folder / "detection"
    convert = run_measured(
        "kscl-convert",
        [*RANDOM, CHANNELS, "--protocol", DETECTION, "--output-dir", str(converted)],
    ).work
    overrides = detection_overrides(facts, sizes, MEASURED_ITERATIONS)
    overrides |= {"OUTPUT_DIR": str(output), "TEST.PRECISE_BN.NUM_ITER": 1}
    words = override_words(overrides)
    config = ["--config-file", str(converted / "config.yaml")]
    spent = run_measured("kscl-train-net", [*config, *words])
    trained = spent.work_of(read_record(output / RECORD_FILE)["details"]["seconds_of_training"])
    iteration = trained / MEASURED_ITERATIONS
    start = spent.work - trained + PRECISE_BN_ITERATIONS / 3 * iteration
    return convert, start, iteration


@dataclass(frozen=True)
class Spent:
    """What a program took: seconds of the processor, and seconds on the clock."""

    work: float
    clock: float

    def work_of(self, seconds: float) -> float:
        """Return the processor's part in some of the seconds on the clock."""
        return self.work * min(1.0, seconds / self.clock)


def run_measured(program: str, arguments: Sequence[str]) -> Spent:
    """Run a tool on one thread; return what it took, with all processes that it started."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            [program_path(program), *arguments],
            stdout=said,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
        )
        _, status, usage = os.wait4(process.pid, 0)  # unlike wait(), it tells the processor's time
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            tail = "\n".join(said.read().strip().splitlines()[-15:])
            raise KsclError(f"A trial of {program} failed, so nothing was written:\n{tail}")
    return Spent(usage.ru_utime + usage.ru_stime, time.monotonic() - began)
