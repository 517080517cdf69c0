"""Try a GPU for the first time (`make gpu-acceptance`), and write one report to attach to an issue.

It checks the driver against torch, runs the GPU tests, times KSCL and MoCo steps at full size in
float32, TF32 and bf16 beside what `kscl plan` says, the loader beside the step, a detector, and two
ranks if there are two GPUs. A part that fails is reported, and the others still run. It takes under
15 minutes; without a GPU it says so and ends.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tabulate import tabulate

from kscl.datasets.shapes import ShapesSettings, make_shapes
from kscl.engine.cost import GPUS, count_costs, expected_efficiency, memory_bytes, step_seconds
from kscl.engine.profile import profile_step
from kscl.keys import load_config
from kscl.main import python_words
from kscl.records.provenance import code_version
from kscl.runtime.machine import hardware, without_kernels
from tests.helpers.commands import ROOT

MINUTES = 15
METHODS = {
    "KSCL, K = 5": "configs/pretrain/kscl_k5_rho40_r50_200ep.yaml",
    "MoCo v2": "configs/pretrain/moco_v2_r50_200ep.yaml",
}
PRECISIONS = {
    "float32": [],
    "TF32": ["SOLVER.TF32", "True"],
    "bf16": ["SOLVER.TF32", "True", "SOLVER.AMP", "bf16", "SOLVER.CHANNELS_LAST", "True"],
}
FULL_SIZE = ["SOLVER.BATCH_SIZE", "32", "SOLVER.SCALE_LR", "False"]  # the paper's part of one GPU
SHAPES = {"num_classes": 5, "unlabeled": 256, "train": 64, "val": 64}
SHAPES |= {"detection_train": 32, "detection_test": 16}
FAR = 0.5  # measured and planned times that differ by more are pointed out


@dataclass
class Trial:
    """What the parts share."""

    folder: Path  # for data and runs
    settings: list[str] = field(default_factory=list)  # of every step, beside those above
    steps: int = 10
    iterations: int = 50  # of the detector
    device: str = "cuda"
    ends: float = field(default_factory=lambda: time.monotonic() + 60 * MINUTES)

    def __post_init__(self) -> None:
        self.images = self.folder / "shapes" / "unlabeled"
        self.configs = {
            (method, precision): load_config(
                file, [*FULL_SIZE, *words, "DATA.TRAIN", str(self.images), *self.settings]
            )
            for method, file in METHODS.items()
            for precision, words in PRECISIONS.items()
        }
        self.costs = {key: count_costs(cfg) for key, cfg in self.configs.items()}

    def run(self, *words: str) -> str:
        """Run a command until it, or the time, ends; return the end of what it printed."""
        left = max(1.0, self.ends - time.monotonic())
        done = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, timeout=left, errors="replace"
        )
        printed = (done.stdout + done.stderr).strip().splitlines()
        if done.returncode:
            raise RuntimeError("\n".join([f"exit code {done.returncode}", *printed[-15:]]))
        return printed[-1] if printed else ""


def machine(trial: Trial) -> Iterator[str]:
    """Yield the hardware, the driver, and whether this torch has code for every GPU."""
    yield f"{code_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}, {hardware()}"
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv"]
        yield subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        yield f"nvidia-smi: {error}"
    for gpu in range(torch.cuda.device_count()):
        lack, fix = without_kernels(gpu)
        if lack:
            raise RuntimeError(f"{lack}. {fix}")


def gpu_tests(trial: Trial) -> Iterator[str]:
    """Yield how the tests end that need a GPU."""
    trial.ends, kept = min(trial.ends, time.monotonic() + 300), trial.ends
    try:
        yield trial.run(sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-m", "gpu")
    finally:
        trial.ends = kept


def steps(trial: Trial) -> Iterator[str]:
    """Yield milliseconds, memory, host syncs and the loader of steps, beside the plan."""
    name = torch.cuda.get_device_name(0)
    gpu = next((GPUS[known] for known in GPUS if known.lower() in name.lower()), None)
    rows, far = [], []
    for (method, precision), cfg in trial.configs.items():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        profile = profile_step(cfg, trial.steps)
        gib = torch.cuda.max_memory_allocated() / 2**30
        costs, planned = trial.costs[method, precision], None
        if gpu is not None:
            planned = 1000 * step_seconds(cfg, costs, gpu, 1, expected_efficiency(cfg, gpu)[0])
            if abs(profile.milliseconds / planned - 1) > FAR:
                far.append(f"{method}, {precision}")
        planned_gib = sum(memory_bytes(cfg, costs, 1).values()) / 2**30
        loader = [profile.syncs, profile.loader_milliseconds, profile.held_back_by]
        measured = [profile.milliseconds, planned, gib, planned_gib]
        rows.append([method, precision, *measured, *loader])
    head = ["method", "precision", "ms", "ms planned", "GiB", "GiB planned"]
    head += ["host syncs", "loader ms", "held back by"]
    yield tabulate(rows, head, tablefmt="github", floatfmt=".1f", missingval="unknown")
    if far:
        yield f"Differs from `kscl plan` by more than {FAR:.0%}: {'; '.join(far)}."


def detector(trial: Trial) -> Iterator[str]:
    """Yield how a short fine-tuning of R50-C4 on drawn scenes ends."""
    out = trial.folder / "detector"
    protocol = ROOT / "configs/detection/shapes_tiny_c4.yaml"
    yield trial.run(
        *python_words("convert", "random", "--arch", "resnet50", "--protocol", str(protocol)),
        *("--output-dir", str(out / "converted")),
    )
    data = trial.folder / "shapes/VOCdevkit/VOC2007"
    sets = [f"voc:{data}:trainval", f"voc:{data}:test"]
    yield trial.run(
        *python_words("train-net", "--config-file", str(out / "converted/config.yaml")),
        *("DATASETS.TRAIN", f"('{sets[0]}',)", "DATASETS.TEST", f"('{sets[1]}',)"),
        *(
            "SOLVER.MAX_ITER",
            str(trial.iterations),
            "MODEL.DEVICE",
            trial.device,
            "OUTPUT_DIR",
            str(out / "run"),
        ),
    )


def two_ranks(trial: Trial) -> Iterator[str]:
    """Yield how a short pretraining on two GPUs ends."""
    if torch.cuda.device_count() < 2:
        yield "not run: there is one GPU"
        return
    config = ["--config-file", "configs/pretrain/shapes_kscl.yaml", "--num-gpus", "2"]
    yield trial.run(
        *python_words("pretrain", *config, "DATA.TRAIN", str(trial.images)),
        *("SOLVER.EPOCHS", "1", "OUTPUT_DIR", str(trial.folder / "two_ranks")),
    )


PARTS: dict[str, Callable[[Trial], Iterator[str]]] = {
    "Machine": machine,
    "Steps": steps,
    "Detector": detector,
    "Two ranks": two_ranks,
    "GPU tests": gpu_tests,
}


def accept(trial: Trial, parts: dict[str, Callable[[Trial], Iterator[str]]]) -> tuple[str, int]:
    """Run the parts; return the report, and how many failed."""
    make_shapes(trial.folder / "shapes", ShapesSettings(**SHAPES))
    lines, failed = ["# GPU acceptance"], 0
    for title, part in parts.items():
        begun = time.monotonic()
        lines += ["", f"## {title}", ""]
        try:
            for text in part(trial):
                lines += [text, ""]
            verdict = "passed"
        except Exception as error:
            failed += 1
            lines += ["```", *traceback.format_exception(error, limit=-3), "```", ""]
            verdict = "FAILED"
        lines.append(f"{verdict} in {time.monotonic() - begun:.0f} s")
        print(f"{title}: {verdict}", flush=True)
    return "\n".join(lines) + "\n", failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report", type=Path, default=Path("gpu_acceptance.md"))
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no GPU that torch can use here, so there is nothing to accept.")
        print("`kscl doctor` says what is missing; the tests run on a fake GPU by `make test-all`.")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        report, failed = accept(Trial(Path(folder)), PARTS)
    given.report.write_text(report)
    print(f"{failed} of {len(PARTS)} parts failed. Attach {given.report} to an issue.")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
