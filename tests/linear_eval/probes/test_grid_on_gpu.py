"""The grid on a GPU, pretended: the features are copied to it once, and no step waits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from linear_eval.backbone import fast_layout
from linear_eval.config import load_linear_eval_config
from linear_eval.probes.sgd_grid import Point, Rows, standardized, start_training, train_points
from tests.helpers.gpu.pretend import TORCH_CUDA, pretend_gpu
from tests.helpers.gpu.tensor import CUDA, METER

CPU = torch.device("cpu")
POINTS = [Point(0.1, 0.0), Point(1.0, 0.01)]
EPOCHS, VIEWS, IMAGES, DIM, CLASSES = 3, 2, 96, 16, 4

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU counts nothing")


def trained(device: torch.device, batch_size: int) -> torch.Tensor:
    """Train on half of a table, which is standardized; return the weights."""
    numbers = torch.Generator().manual_seed(0)
    table = torch.randn(2 * VIEWS * IMAGES, DIM, generator=numbers)
    labels = torch.randint(0, CLASSES, (IMAGES,), generator=numbers)
    indices = np.random.default_rng(0).permutation(len(table))[: VIEWS * IMAGES]
    rows = standardized(Rows(table, indices.reshape(VIEWS, IMAGES), labels))
    words = ["SOLVER.EPOCHS", str(EPOCHS), "SOLVER.MILESTONES", "[2]"]
    solver = load_linear_eval_config(None, [*words, "SOLVER.BATCH_SIZE", str(batch_size)]).SOLVER
    start = start_training(len(POINTS), CLASSES, DIM, 0.01, 0, device)
    METER.reset()
    return train_points(rows, POINTS, start, solver, 0).weight.cpu()


def waits(batch_size: int) -> int:
    with pretend_gpu():
        weight = trained(CUDA, batch_size)
        found = METER.syncs.total()
    torch.testing.assert_close(weight, trained(CPU, batch_size))
    return found


def test_smaller_batches_wait_no_more_often():
    assert waits(batch_size=8) == waits(batch_size=48)


def test_features_that_do_not_fit_stay_where_they_are_and_give_the_same(monkeypatch):
    before = waits(batch_size=8)
    needed = 4 * VIEWS * IMAGES * DIM
    free = (2 * needed - 2, 2 * needed)
    monkeypatch.setitem(TORCH_CUDA, "mem_get_info", lambda *_: free)
    # A copy of features per step, instead of one of all and one of their order per epoch.
    assert waits(batch_size=8) == before + EPOCHS * IMAGES / 8 - 1 - EPOCHS


def test_half_precision_on_a_gpu_has_the_channels_last():
    assert fast_layout(CUDA, torch.bfloat16) is torch.channels_last
    assert fast_layout(CUDA, None) is torch.contiguous_format
    assert fast_layout(CPU, None) is torch.channels_last
