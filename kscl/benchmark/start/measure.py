"""Measure what stages cost on this machine: the tools themselves, a few steps each."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
MEASURED_ITERATIONS = 8
PRECISE_BN_ITERATIONS = 20  # forward passes at the end of a fine-tuning, a third of the work each
PRETRAIN, DETECTION = "pretrain/bccd_moco.yaml", "detection/bccd_tiny_c4.yaml"
LINEAR, KNN = "linear_eval/shapes.yaml", "linear_eval/shapes_knn.yaml"
RANDOM = ("random", "--arch", "resnet50", "--arch-kwargs")
CHANNELS = "{channels: [8, 16, 32, 64], zero_init_last: true}"


def measure(facts: Facts, sizes: Sizes, cores: int) -> Costs:
    """Run every kind of stage for a moment; return the seconds of their parts.

    They run side by side as the stages of the suite will, so the seconds are those of stages that
    share this machine, with each other and with whatever else it does.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kscl-start-") as name,
        ThreadPoolExecutor(max(1, min(cores, 2))) as threads,
    ):
        folder = Path(name)
        steps = {"SOLVER.MAX_STEPS": MEASURED_STEPS, "SOLVER.WARMUP_EPOCHS": 0}
        moco = pretrain_overrides(facts, sizes, 1) | steps
        kscl = moco | kscl_overrides(1) | steps
        of_detection = threads.submit(_detection, folder, facts, sizes)
        of_moco = threads.submit(_pretraining, folder / "moco", moco)
        of_kscl = threads.submit(_pretraining, folder / "kscl", kscl)
        of_probe = threads.submit(_probe, folder / "probe", facts)
        start, moco_step = of_moco.result()
        # More views per image never cost less; a moment in which the machine is less busy does.
        kscl_step = max(moco_step, of_kscl.result()[1])
        epoch = epoch_steps(facts)
        return Costs(
            start,
            epoch * moco_step,
            epoch * kscl_step,
            *of_detection.result(),
            of_probe.result(),
        )


def _probe(folder: Path, facts: Facts) -> float:
    if facts.classes is None:
        return 0.0
    network = {"BACKBONE.WEIGHTS": "random", "BACKBONE.NAME": "resnet50"}
    network |= {"BACKBONE.KWARGS": CHANNELS, "OUTPUT_DIR": str(folder)}
    words = override_words({**probe_overrides(facts), **network})
    return _seconds("kscl-linear-eval", ["--config-file", LINEAR, *words])


def _pretraining(folder: Path, overrides: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds of all of a pretraining but its steps, and of a step."""
    words = override_words({**overrides, "OUTPUT_DIR": str(folder)})
    whole = _seconds("kscl-pretrain", ["--config-file", PRETRAIN, *words])
    trained = read_record(folder / RECORD_FILE)["seconds"]
    return max(0.0, whole - trained), trained / MEASURED_STEPS


def _detection(folder: Path, facts: Facts, sizes: Sizes) -> tuple[float, float, float]:
    """Return the seconds of a conversion, of all of a fine-tuning but its steps, and of a step."""
    if facts.boxes is None:
        return 0.0, 0.0, 0.0
    converted, output = folder / "converted", folder / "detection"
    convert = _seconds(
        "kscl-convert",
        [*RANDOM, CHANNELS, "--protocol", DETECTION, "--output-dir", str(converted)],
    )
    overrides = detection_overrides(facts, sizes, MEASURED_ITERATIONS)
    overrides |= {"OUTPUT_DIR": str(output), "TEST.PRECISE_BN.NUM_ITER": 1}
    words = override_words(overrides)
    config = ["--config-file", str(converted / "config.yaml")]
    whole = _seconds("kscl-train-net", [*config, *words])
    trained = read_record(output / RECORD_FILE)["details"]["seconds_of_training"]
    iteration = trained / MEASURED_ITERATIONS
    start = max(0.0, whole - trained) + PRECISE_BN_ITERATIONS / 3 * iteration
    return convert, start, iteration


def _seconds(program: str, arguments: Sequence[str]) -> float:
    """Run a tool; return how long it took."""
    began = time.monotonic()
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [program_path(program), *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    if done.returncode:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])
        raise KsclError(f"A trial of {program} failed, so nothing was written:\n{tail}")
    return time.monotonic() - began
