"""Measure what stages cost on this machine: the tools themselves, a few steps each."""

from __future__ import annotations

import os
import re
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

MEASURED_STEPS = 24
MEASURED_ITERATIONS = 16
STEP = re.compile(r"\b(?:iter:|step) (\d+)\b")  # in the log of a fine-tuning or a pretraining
PERIOD = 0.05  # seconds between two looks at it
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
        steps |= {"LOG.PERIOD": 4, "DATA.NUM_WORKERS": 0}  # all work is in one process
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
    start = max(0.0, spent.work - MEASURED_STEPS * spent.step)
    return start, spent.step, spent.clock / spent.work


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
    more = PRECISE_BN_ITERATIONS / 3 - MEASURED_ITERATIONS
    return convert, max(0.0, spent.work + more * spent.step), spent.step


@dataclass(frozen=True)
class Spent:
    """What a program took: seconds of the processor, and seconds on the clock."""

    work: float
    clock: float
    step: float  # processor seconds of a step, without the first ones; 0 if it told of no steps


def run_measured(program: str, arguments: Sequence[str]) -> Spent:
    """Run a tool on one thread; return what it took, with all processes that it started."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    began = time.monotonic()
    marks: list[tuple[int, float]] = []  # a step that the tool tells of, and its processor time
    with tempfile.NamedTemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            [program_path(program), *arguments],
            stdout=said,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
        )
        try:
            ended, status, usage = 0, 0, None
            while not ended:  # unlike wait(), wait4() tells the processor's time
                ended, status, usage = os.wait4(process.pid, os.WNOHANG)
                if not ended:
                    marks += _new_mark(Path(said.name), marks, process.pid)
                    time.sleep(PERIOD)
        except BaseException:
            process.kill()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            tail = "\n".join(Path(said.name).read_text(errors="replace").strip().splitlines()[-15:])
            raise KsclError(f"A trial of {program} failed, so nothing was written:\n{tail}")
    assert usage is not None
    clock, work = time.monotonic() - began, usage.ru_utime + usage.ru_stime
    if len(marks) < 2:
        return Spent(work, clock, 0.0)
    (first, before), (last, after) = marks[0], marks[-1]
    return Spent(work, clock, (after - before) / (last - first))


def _new_mark(log: Path, marks: Sequence[tuple[int, float]], pid: int) -> list[tuple[int, float]]:
    """Return the last step that the log tells of with the time so far, if it is a new one."""
    told = STEP.findall(log.read_text(errors="replace"))
    if not told or (marks and int(told[-1]) == marks[-1][0]):
        return []
    return [(int(told[-1]), processor_seconds(pid))]


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process; seconds on the clock where the system hides it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
