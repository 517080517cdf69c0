"""Probes on a GPU, faked where there is none: the CPU's numbers, and no step waits."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from kscl.records.record import read_record
from linear_eval.backbone import fast_layout
from linear_eval.commands.linear_eval import main
from linear_eval.linear import Rows, standardized, start_grid, train_grid
from linear_eval.probe import load_linear_eval_config
from tests.helpers.data.digits import overrides
from tests.helpers.gpu.pretend import TORCH_CUDA, pretend_gpu
from tests.helpers.gpu.tensor import CUDA, METER

pytestmark = pytest.mark.full

PROBES = {
    "online": [],
    "online in bf16": ["SOLVER.AMP", "bf16"],
    "cached": ["PROBE", "cached", "SOLVER.SCHEDULE", "cosine"],
    "cached by lbfgs": ["PROBE", "cached", "CACHED.METHOD", "lbfgs", "CACHED.LBFGS_ITERATIONS", 5],
    "knn": ["PROBE", "knn"],
}


def top1(digits, folder, words) -> float:
    cache = ["DATA.CACHE_DIR", folder / "cache"]
    assert main(overrides(digits, folder / "run", *cache, *words)) == 0
    return read_record(folder / "run" / "record.json")["metrics"]["top1"]


@pytest.mark.parametrize(
    "gpu",
    [
        pytest.param(
            pretend_gpu,
            id="fake",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU"),
            ],
        ),
        pytest.param(contextlib.nullcontext, id="real", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_on_a_gpu_has_the_score_of_the_cpu(probe, gpu, digits, tmp_path):
    with pytest.MonkeyPatch.context() as hidden:
        hidden.setattr(torch.cuda, "is_available", lambda: False)
        on_cpu = top1(digits, tmp_path / "cpu", PROBES[probe])
    with gpu():
        on_gpu = top1(digits, tmp_path / "gpu", PROBES[probe])
    one_image = 100 / 60
    assert on_gpu == pytest.approx(on_cpu, abs=2 * one_image if "bf16" in probe else one_image)


CPU = torch.device("cpu")
POINTS = [{"lr": 0.1, "weight_decay": 0.0}, {"lr": 1.0, "weight_decay": 0.01}]
EPOCHS, VIEWS, IMAGES, DIM, CLASSES = 3, 2, 96, 16, 4

counted = pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU counts nothing")


def trained(device: torch.device, batch_size: int) -> torch.Tensor:
    """Train on half of a table, which is standardized; return the weights."""
    numbers = torch.Generator().manual_seed(0)
    table = torch.randn(2 * VIEWS * IMAGES, DIM, generator=numbers)
    labels = torch.randint(0, CLASSES, (IMAGES,), generator=numbers)
    indices = np.random.default_rng(0).permutation(len(table))[: VIEWS * IMAGES]
    rows = standardized(Rows(table, indices.reshape(VIEWS, IMAGES), labels))
    words = ["SOLVER.EPOCHS", str(EPOCHS), "SOLVER.MILESTONES", "[2]"]
    solver = load_linear_eval_config(None, [*words, "SOLVER.BATCH_SIZE", str(batch_size)]).SOLVER
    state = start_grid(len(POINTS), CLASSES, DIM, 0.01, 0, device)
    METER.reset()
    list(train_grid(rows, POINTS, state, solver, 0))
    return state["weight"].cpu()


def waits(batch_size: int) -> int:
    with pretend_gpu():
        weight = trained(CUDA, batch_size)
        found = METER.syncs.total()
    torch.testing.assert_close(weight, trained(CPU, batch_size))
    return found


@counted
def test_smaller_batches_wait_no_more_often():
    assert waits(batch_size=8) == waits(batch_size=48)


@counted
def test_features_that_do_not_fit_stay_where_they_are_and_give_the_same(monkeypatch):
    before = waits(batch_size=8)
    needed = 4 * VIEWS * IMAGES * DIM
    free = (2 * needed - 2, 2 * needed)
    monkeypatch.setitem(TORCH_CUDA, "mem_get_info", lambda *_: free)
    # A copy of features per step, instead of one of all and one of their order per epoch.
    assert waits(batch_size=8) == before + EPOCHS * IMAGES / 8 - 1 - EPOCHS


@counted
def test_half_precision_on_a_gpu_has_the_channels_last():
    assert fast_layout(CUDA, torch.bfloat16) is torch.channels_last
    assert fast_layout(CUDA, None) is torch.contiguous_format
    assert fast_layout(CPU, None) is torch.channels_last
