"""Measure what stages cost on this machine: the tools themselves, a few steps each."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kscl.benchmark.start.choose import (
    Costs,
    Sizes,
    detection_overrides,
    kscl_overrides,
    pretrain_overrides,
    probe_overrides,
)
from kscl.benchmark.start.facts import Facts
from kscl.benchmark.suite.execute import program_path
from kscl.benchmark.suite.spec import override_words
from kscl.errors import KsclError
from kscl.records.record import RECORD_FILE, read_record

MEASURED_EPOCHS = 3
MEASURED_ITERATIONS = 8
PRECISE_BN_ITERATIONS = 20  # forward passes at the end of a fine-tuning, a third of the work each
PRETRAIN, DETECTION = "pretrain/bccd_moco.yaml", "detection/bccd_tiny_c4.yaml"
LINEAR, KNN = "linear_eval/shapes.yaml", "linear_eval/shapes_knn.yaml"
RANDOM = ("random", "--arch", "resnet50", "--arch-kwargs")
CHANNELS = "{channels: [8, 16, 32, 64], zero_init_last: true}"


def measure(facts: Facts, sizes: Sizes) -> Costs:
    """Run every kind of stage for a moment; return the seconds of their parts."""
    with tempfile.TemporaryDirectory(prefix="kscl-start-") as name:
        folder = Path(name)
        moco = pretrain_overrides(facts, sizes, MEASURED_EPOCHS)
        start, moco_epoch = _pretraining(folder / "moco", moco)
        _, kscl_epoch = _pretraining(folder / "kscl", {**moco, **kscl_overrides(MEASURED_EPOCHS)})
        convert = detection = iteration = probe = 0.0
        if facts.boxes is not None:
            convert, detection, iteration = _detection(folder, facts, sizes)
        if facts.classes is not None:
            network = {"BACKBONE.WEIGHTS": "random", "BACKBONE.NAME": "resnet50"}
            network |= {"BACKBONE.KWARGS": CHANNELS, "OUTPUT_DIR": str(folder / "probe")}
            words = override_words({**probe_overrides(facts), **network})
            probe = _seconds("kscl-linear-eval", ["--config-file", LINEAR, *words])
    return Costs(start, moco_epoch, kscl_epoch, convert, detection, iteration, probe)


def _pretraining(folder: Path, overrides: dict[str, Any]) -> tuple[float, float]:
    words = override_words({**overrides, "OUTPUT_DIR": str(folder)})
    whole = _seconds("kscl-pretrain", ["--config-file", PRETRAIN, *words])
    trained = read_record(folder / RECORD_FILE)["seconds"]
    return max(0.0, whole - trained), trained / MEASURED_EPOCHS


def _detection(folder: Path, facts: Facts, sizes: Sizes) -> tuple[float, float, float]:
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
