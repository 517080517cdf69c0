"""Short trainings on a GPU, which is pretended where there is none, and what a step has cost."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kscl.backbone_file import read_plain
from kscl.engine import loop
from kscl.engine.loop import TrainState, build_state, restore
from kscl.keys import load_config
from kscl.run.checkpoint import find_checkpoints, save_checkpoint, step_of
from kscl.runtime.distributed import LateVote
from kscl.views.batch import Batch
from tests.helpers.gpu.pretend import pretend_gpu, pretend_ranks
from tests.helpers.gpu.tensor import CUDA, METER
from tests.helpers.runs import TINY

CPU = torch.device("cpu")
RANKS = 8
REAL = torch.cuda.is_available()
PRETENDED = pytest.mark.skipif(REAL, reason="a real GPU counts nothing, and finds faults itself")
# A pretended GPU has the CPU's kernels, but leaves nothing out, and four steps magnify rounding:
# by up to 1.8e-5 over all settings on two instruction sets. Faults make 5e-4 and more.
TOLERANCE = 1e-2 if REAL else 1e-4
STEPS, MEASURED, SAVED = 4, 2, 3  # steps in all, the one that is counted, the one after the save
K5 = ["METHOD.NUM_SHOTS", 5, "METHOD.RHO", 0.4]


class Loader:
    """Batches from a step on; between them it is read what the step before has cost."""

    def __init__(self, cfg: Any, ranks: int, first: int) -> None:
        self.cfg, self.ranks, self.first = cfg, ranks, first
        self.seconds_waited = 0.0
        self.bad_images = SimpleNamespace(reasons={})
        self.syncs: Counter[Any] = Counter()
        self.collectives: Counter[Any] = Counter()
        self.told = ""

    def __iter__(self) -> Iterator[Batch]:
        size, method, tiny = self.cfg.INPUT.SIZE, self.cfg.METHOD, self.cfg.VIEWS.SMALL
        count = self.cfg.SOLVER.BATCH_SIZE // self.ranks
        for step in range(self.first, STEPS):
            if step == MEASURED:  # what came before is the step before
                self.syncs, self.collectives = Counter(METER.syncs), Counter(METER.collectives)
                self.told = METER.told()
            METER.reset()
            METER.step += 1
            numbers = torch.Generator().manual_seed(step)
            shape = (count, method.NUM_QUERIES + method.NUM_SHOTS, 3, size, size)
            views = torch.randint(0, 256, shape, dtype=torch.uint8, generator=numbers)
            small = views[:, : tiny.COUNT, :, : tiny.SIZE, : tiny.SIZE] if tiny.COUNT else None
            if not self.cfg.DATA.NORMALIZE_ON_DEVICE:
                views = views.float() / 100 - 1
            chosen = torch.randperm(96, generator=numbers)[:count]
            if torch.cuda.is_available():
                views, chosen = views.pin_memory(), chosen.pin_memory()
                small = None if small is None else small.pin_memory()
            yield Batch(views, chosen, [], small)


class Log:
    """Keeps the metrics that are reported."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def add_step(self, images: int, seconds: float) -> None:
        pass

    def report(self, metrics: dict[str, float], waited: float) -> None:
        self.metrics = dict(metrics)


@contextlib.contextmanager
def gpu(ranks: int = 1) -> Iterator[torch.device]:
    """Yield a real GPU if there is one, else a pretended one."""
    if REAL:
        yield CUDA
    else:
        with pretend_gpu(), pretend_ranks(ranks):
            yield CUDA


def train(
    words: list[Any], folder: Path, device: torch.device, ranks: int = 1, resume: bool = False
) -> tuple[TrainState, Loader, dict[str, float]]:
    """Train with the settings; `resume` begins at the checkpoint of an earlier training."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "tiny.yaml"
    file.write_text(TINY)
    more = ["SOLVER.EPOCHS", 1, "CHECKPOINT.PERIOD_STEPS", SAVED, "SOLVER.LR_UPDATE", "epoch"]
    more += ["SOLVER.DETERMINISTIC", REAL]
    cfg = load_config(file, [str(word) for word in [*more, *words]])
    with patch.object(loop, "distributed", lambda method: method):  # it needs a real GPU
        trained = build_state(cfg, 96, STEPS, device)
        if resume:
            (path,) = (path for path in find_checkpoints(folder) if step_of(path) == SAVED)
            restore(trained, read_plain(path))
        loader, log = Loader(cfg, ranks, trained.step), Log()
        vote = LateVote()
        for step in loop.train_steps(trained, loader, None, log):  # type: ignore[arg-type]
            vote.hold(False)
            if step in (SAVED, STEPS):
                save_checkpoint(folder, step, loop.state_dict(trained), keep=2)
        vote.close()
    return trained, loader, log.metrics


def on_host(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in state.items()}
