"""Draw how time and memory grow with the images, the shots K, the queue and the ranks.

    python -m tests.benchmarks.growth docs/growth.png

Everything is measured here, each point in a process of its own, except 8 and 64 ranks: they are a
model of a ring all-reduce that is fitted to one and two ranks, and the chart says so.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kscl.engine.loop import take_step
from kscl.runtime.machine import hardware
from tests.benchmarks.engine import (
    SMALL,
    all_threads,
    config,
    new_training,
    preloaded,
    steps_of_two,
)
from tests.benchmarks.harness import seconds
from tests.benchmarks.learner import QUERIES, filled_queue, unit
from tests.benchmarks.million import MIB, _status_bytes, empty_files, start

IMAGES = (1_000, 10_000, 100_000, 1_000_000)
SHOTS = (1, 2, 3, 4, 5, 6, 7, 8)
QUEUES = tuple(2**power for power in range(10, 19, 2))
RANKS, MODELED = (1, 2), (8, 64)
REPEATS = 5
Cost = tuple[float, float]  # seconds and MiB


def apart(work: Callable[..., Any], *words: Any) -> Any:
    """Return what the work returns in a process of its own, whose memory starts anew."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *words).result()


def cost(work: Callable[[], object], repeats: int) -> Cost:
    """Return the median seconds of the work and the memory that it adds at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    before = _status_bytes("VmRSS")
    took = statistics.median(seconds(work) for _ in range(repeats))
    return took, (_status_bytes("VmHWM") - before) / MIB


def start_on(root: Path, images: int) -> Cost:
    return cost(lambda: start(root, "files", images), repeats=1)


def starts_on(images: int) -> tuple[Cost, Cost]:
    """Return the cost of the first start on so many files and of one from the cache."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        empty_files(root / "files", images)
        time.sleep(2.5)  # an index is trusted if it is younger than what it was made from
        return apart(start_on, root, images), apart(start_on, root, images)


def step_of(shots: int) -> Cost:
    all_threads()
    cfg = config(*SMALL, "METHOD.NUM_SHOTS", shots)
    training, batch = new_training(cfg), preloaded(cfg)
    return cost(lambda: take_step(training, batch), REPEATS)


def loss_on(length: int) -> Cost:
    """Return the cost of the negatives and their gradient, for a queue of this length."""
    all_threads()
    queue = filled_queue(0.0, length)
    query, number = unit(QUERIES, 128).requires_grad_(), torch.zeros(QUERIES, dtype=torch.long)

    def work() -> None:
        found = queue.negatives(query, number, unit(QUERIES, 1, 128), number, 0.2)
        torch.autograd.grad(found.log_sum.mean(), query)

    return cost(work, REPEATS)


def ring(ranks: int) -> float:
    """Return what a rank sends in a ring all-reduce, in copies of the gradient; 1 for two ranks."""
    return 2 * (ranks - 1) / ranks


def draw(axes: Axes, x: Sequence[float], costs: Sequence[Cost], label: str = "") -> None:
    """Draw seconds as a full line, and memory as a dashed one on the right."""
    axes.plot(x, [took for took, _ in costs], "o-", label=f"{label}seconds")
    right = axes.twinx()
    right.plot(x, [memory for _, memory in costs], "s--", color="0.6")
    right.set_ylabel("MiB (dashed)", color="0.4")
    right.set_ylim(bottom=0)


def chart() -> Figure:
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    (images, shots), (queue, ranks) = figure.subplots(2, 2)

    first, second = zip(*(starts_on(count) for count in IMAGES), strict=True)
    images.plot(IMAGES, [took for took, _ in first], "o:", label="first start, seconds")
    draw(images, IMAGES, second, "later starts, ")
    images.set(xscale="log", yscale="log", title="Start-up, images in folders", xlabel="images")

    steps = [apart(step_of, count) for count in SHOTS]
    draw(shots, SHOTS, steps)
    unit_pass = steps[0][0] / 4
    shots.plot(SHOTS, [unit_pass * (3 + count) for count in SHOTS], ":", label="(3 + K) / 4")
    shots.set(title="A training step, ResNet-18, 96 px, batch 32", xlabel="shots K")

    draw(queue, QUEUES, [apart(loss_on, length) for length in QUEUES])
    queue.set(
        xscale="log",
        yscale="log",
        title="The loss against a queue, 256 queries, D 128",
        xlabel="entries",
    )

    alone, pair = (statistics.median(it) for it in zip(*steps_of_two(), strict=True))
    ranks.plot(RANKS, [alone, pair], "o-", label="measured")
    model = [alone + (pair - alone) * ring(count) for count in MODELED]
    ranks.plot((2, *MODELED), [pair, *model], "o:", mfc="white", label="model: ring all-reduce")
    ranks.set(xscale="log", title="A step of 64 images per rank, one core each", xlabel="ranks")
    ranks.set_xticks([*RANKS, *MODELED], [str(count) for count in (*RANKS, *MODELED)])

    for axes in (images, shots, queue, ranks):
        axes.set_ylabel("seconds")
        axes.legend(loc="upper left", fontsize="small")
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
    found = hardware()
    figure.suptitle(f"Measured on {found['cores']} cores of {found['cpu']}", fontsize=10)
    return figure


if __name__ == "__main__":
    chart().savefig(sys.argv[1], dpi=110)
