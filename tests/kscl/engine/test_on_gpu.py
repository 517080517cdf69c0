"""Training on a GPU, which is pretended where there is none: devices, resume, and what it costs.

`make test-gpu` runs the same cases on a real one.
"""

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
import torch.distributed as dist
from torch import Tensor

from kscl.backbone_file import read_plain
from kscl.config.merge import load_config
from kscl.data.view_dataset import Batch
from kscl.engine import loop, state
from kscl.engine.checkpoint import find_checkpoints, step_of
from kscl.engine.state import TrainState, build_state, restore
from kscl.errors import KsclError
from kscl.method import checks, dictionary
from kscl.method.learner import Learner
from kscl.runtime.shuffle import Shuffle
from kscl.runtime.signals import StopRequest
from tests.helpers.gpu_tensor import CUDA, METER, PretendCudaError
from tests.helpers.pretend_gpu import pretend_gpu, pretend_ranks
from tests.helpers.runs import TINY, same_bits

CPU = torch.device("cpu")
RANKS = 8
REAL = torch.cuda.is_available()
PRETENDED = pytest.mark.skipif(REAL, reason="a real GPU counts nothing, and finds faults itself")
# A pretended GPU has the CPU's kernels, but leaves nothing out, and four steps magnify rounding.
TOLERANCE = 1e-2 if REAL else 1e-3
STEPS, MEASURED, SAVED = 4, 2, 3  # steps in all, the one that is counted, the one after the save

SHARED = ["KEY_ENCODER.TYPE", "shared", "METHOD.GRAD_THROUGH_KEYS", True]
MINIBATCH = ["DICTIONARY.TYPE", "minibatch"]
BANK = ["DICTIONARY.TYPE", "memory_bank"]
COSINE = ["METHOD.NUM_SHOTS", 1, "METHOD.SIMILARITY", "cosine"]
K5 = ["METHOD.NUM_SHOTS", 5, "METHOD.RHO", 0.4]
# Settings, and the most host synchronizations and collectives per step: with one GPU, with eight.
# A memory bank asks which images of a batch are the same.
CASES: dict[str, tuple[list[Any], tuple[int, int, int]]] = {
    "kscl": (K5, (1, 1, 5)),
    "kscl with fixed BatchNorm": ([*K5, "KEY_ENCODER.BATCH_NORM", "eval"], (1, 1, 3)),
    "moco": (COSINE, (0, 0, 5)),
    "simclr": (
        [*MINIBATCH, *COSINE, *SHARED, "METHOD.SYMMETRIC", True, "SOLVER.OPTIMIZER", "lars"],
        (0, 0, 5),
    ),
    "memory bank": ([*K5, *BANK, "DICTIONARY.BANK_MOMENTUM", 0.5], (3, 3, 5)),
    "several queries of two sizes": (
        [*K5, "METHOD.NUM_QUERIES", 2, "VIEWS.SMALL.COUNT", 2, "VIEWS.SMALL.SIZE", 16],
        (1, 1, 5),
    ),
    "kscl by Jacobi rotations": ([*K5, "METHOD.EIGH", "jacobi"], (0, 0, 5)),
    "bf16, channels last, clipped": (
        [*K5, "SOLVER.AMP", "bf16", "SOLVER.CHANNELS_LAST", True, "SOLVER.CLIP_GRAD_NORM", 1.0],
        (1, 1, 5),
    ),
}
MORE: dict[str, tuple[list[Any], tuple[int, int, int]]] = {
    "minibatch": (MINIBATCH, (1, 1, 6)),
    "end to end": ([*MINIBATCH, *SHARED], (1, 1, 6)),
    "mean of the keys": (["METHOD.SIMILARITY", "mean_cosine"], (0, 0, 5)),
    "everything kept": ([*K5[:2], "METHOD.RHO", 1.0], (1, 1, 5)),
    "accumulated": ([*K5, "SOLVER.GRAD_ACCUM_STEPS", 2, "SOLVER.BATCH_SIZE", 32], (2, 2, 9)),
    "adamw": ([*K5, "SOLVER.OPTIMIZER", "adamw"], (1, 1, 5)),
    "normalized in the workers": ([*K5, "DATA.NORMALIZE_ON_DEVICE", False], (1, 1, 5)),
    "moco in a bank": ([*BANK, *COSINE], (1, 1, 5)),
    # Without BatchNorm all keys go in one pass, whose layers would be dropped by other draws.
    "transformer": (
        [*K5, "BACKBONE.NAME", "test_vit", "BACKBONE.KWARGS.drop_path_rate", 0, "INPUT.SIZE", 160],
        (1, 1, 3),
    ),
    "fp16": ([*K5, "SOLVER.AMP", "fp16"], (2, 2, 5)),  # its scaler asks whether to step
}


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
    with (
        patch.object(state, "distributed", lambda learner: learner),  # it needs a real GPU
        patch.object(loop, "about_checkpoint", lambda *_: {}),
    ):
        trained = build_state(cfg, 96, STEPS, device)
        if resume:
            (path,) = (path for path in find_checkpoints(folder) if step_of(path) == SAVED)
            restore(trained, read_plain(path))
        loader, log = Loader(cfg, ranks, trained.step), Log()
        loop.train(trained, loader, None, {}, folder, log, StopRequest())  # type: ignore[arg-type]
    return trained, loader, log.metrics


def on_host(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in state.items()}


def check(case: str, words: list[Any], most: tuple[int, int, int], folder: Path) -> None:
    """Train on a GPU: the metrics are the CPU's, a resumed run ends in the same bits, at this cost.

    On several ranks the data is the same on each, so there is no other number to compare.
    """
    expected = {} if case == "fp16" else train(words, folder / "cpu", CPU)[2]
    with gpu() as device:
        trained, loader, metrics = train(words, folder / "gpu", device)
        resumed, _, _ = train(words, folder / "gpu", device, resume=True)
        ends = [on_host(each.learner.state_dict()) for each in (trained, resumed)]
    assert same_bits(*ends)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=TOLERANCE)
    assert sum(loader.syncs.values()) <= most[0], loader.told
    if not REAL:
        with gpu(RANKS) as device:
            _, loader, _ = train(words, folder / "ranks", device, RANKS)
        assert sum(loader.syncs.values()) <= most[1], loader.told
        assert sum(loader.collectives.values()) <= most[2], loader.told


@pytest.mark.parametrize("case", CASES)
def test_a_gpu_trains_as_the_cpu_does_and_waits_for_no_more_than_it_must(case, tmp_path):
    check(case, *CASES[case], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_every_other_setting_trains_on_a_gpu_too(case, tmp_path):
    check(case, *MORE[case], tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("case", {**CASES, **MORE})
def test_a_real_gpu_trains_as_the_cpu_does(case, tmp_path):
    check(case, *{**CASES, **MORE}[case], tmp_path)


def at_once(check: Any, step: int, views: Tensor, **results: Tensor) -> None:
    """Look for NaN as on a CPU."""
    checks.check_finite(step, views, **results)


def on_the_cpu(learner: Any, batch: int, indices: Tensor | None, device: torch.device) -> Tensor:
    return torch.arange(batch)


def with_views_left(views: Tensor, cfg: Any, device: torch.device) -> Tensor:
    return views if views.device.type == "cpu" else views.cpu()


def as_int16(local: Tensor) -> Tensor:
    everyone = local.new_empty(RANKS * len(local), *local.shape[1:], dtype=torch.int16)
    dist.all_gather_into_tensor(everyone, local.to(torch.int16))
    return everyone.to(local.dtype)


def with_cpu_generator(seed: int, step: int) -> None:
    torch.rand(1, device=CUDA, generator=torch.Generator().manual_seed(step))


FAULTS: dict[str, tuple[Any, str, Any, int]] = {
    "views stay on the CPU": (loop, "to_device", with_views_left, 1),
    "instances stay on the CPU": (Learner, "_instances", on_the_cpu, 1),
    "a CPU generator draws for the GPU": (loop, "seed_step", with_cpu_generator, 1),
    "a type that NCCL does not know": (dictionary, "gather", as_int16, RANKS),
}


@PRETENDED
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_devices_is_noticed(fault, tmp_path):
    owner, name, faulty, ranks = FAULTS[fault]
    with gpu(ranks) as device, patch.object(owner, name, faulty), pytest.raises(PretendCudaError):
        train(["DICTIONARY.TYPE", "minibatch"], tmp_path, device, ranks)


@PRETENDED
def test_a_step_that_waits_is_noticed(tmp_path):
    with gpu() as device, patch.object(checks.FiniteCheck, "__call__", at_once):
        _, loader, _ = train(K5, tmp_path, device)
    assert sum(loader.syncs.values()) > CASES["kscl"][1][0]
    assert any("kscl/method/checks.py" in line for _, line in loader.syncs)


@pytest.mark.parametrize("similarity", ["projection", "mean_cosine"])
def test_nan_on_a_gpu_is_found_a_step_later_and_before_a_checkpoint(similarity, tmp_path):
    words = ["METHOD.SIMILARITY", similarity]
    with (
        gpu() as device,
        pytest.raises(KsclError, match=r"step \d+ .*NaN or infinity .* step 1 in"),
    ):
        train([*words, "SOLVER.BASE_LR", 1e30], tmp_path, device)
    assert not find_checkpoints(tmp_path)


@PRETENDED
def test_shuffled_views_travel_as_bytes_and_only_where_they_are_needed(tmp_path):
    with gpu(RANKS) as device:
        views = torch.zeros(32, 5, 3, 8, 8, dtype=torch.uint8, device=device)
        METER.reset()
        Shuffle(views, 0).encode(lambda images: images.flatten(1)[:, :4].float())
        images, embeddings = 32 * 5 * 3 * 8 * 8, 32 * 5 * 4 * 4
        assert METER.received.total() == images + embeddings
    assert 256 // RANKS * 5 * 3 * 224 * 224 < 25e6  # so many at 224 pixels, 256 images and K = 5
