"""VICReg against its formulas written out, on one process and two, and its check for a collapse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from kscl.errors import ConfigError
from kscl.keys import load_config
from kscl.methods.vicreg import VICReg
from kscl.views.batch import Batch
from tests.helpers.networks.learners import DIM, small_encoder, views_of

pytestmark = pytest.mark.portable

WEIGHTS = {"INVARIANCE": 3.0, "VARIANCE": 2.0, "COVARIANCE": 0.5}
BATCH, RANKS = 8, 2


def build() -> VICReg:
    words = ["METHOD.NAME", "vicreg", "PROJECTOR.DIM", DIM]
    words += [word for key, value in WEIGHTS.items() for word in (f"METHOD.{key}", value)]
    return VICReg(load_config(None, [str(word) for word in words]), None, small_encoder()).double()


def views() -> Tensor:
    return views_of(BATCH, 1).double()


def by_hand(a: np.ndarray, b: np.ndarray) -> float:
    """The paper's equations 1 to 6, dimension by dimension."""
    count, dim = a.shape
    total = (
        WEIGHTS["INVARIANCE"]
        * sum((a[n, d] - b[n, d]) ** 2 for n in range(count) for d in range(dim))
        / (count * dim)
    )
    for z in (a, b):
        covariance = np.cov(z.T)  # divided by n - 1
        hinge = [max(0.0, 1 - np.sqrt(covariance[d, d] + 1e-4)) for d in range(dim)]
        pairs = [covariance[i, j] ** 2 for i in range(dim) for j in range(dim) if i != j]
        total += (
            WEIGHTS["VARIANCE"] * sum(hinge) / dim / 2 + WEIGHTS["COVARIANCE"] * sum(pairs) / dim
        )
    return float(total)


def test_the_loss_is_the_sum_of_the_three_terms() -> None:
    learner = build()
    a, b = (learner.encoder(views()[:, v]).detach().numpy() for v in (0, 1))
    figures = learner(Batch(views(), torch.arange(BATCH)))
    assert figures["loss"].item() == pytest.approx(by_hand(a, b))
    std = np.mean([np.sqrt(z.var(0, ddof=1) + 1e-4) for z in (a, b)])
    assert float(figures["std"]) == pytest.approx(std)


def on_a_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    learner = build()
    loss = learner(Batch(views().chunk(RANKS)[rank], torch.arange(BATCH // RANKS)))["loss"]
    loss.backward()
    gradients = [weight.grad for weight in learner.encoder.parameters()]
    torch.save((loss.detach(), gradients), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.full
def test_two_processes_have_the_loss_and_the_gradient_of_the_joined_batch(tmp_path: Path) -> None:
    mp.spawn(on_a_rank, (str(tmp_path),), RANKS)  # type: ignore[no-untyped-call]
    losses, gradients = zip(*(torch.load(tmp_path / f"{n}.pt") for n in range(RANKS)), strict=True)
    learner = build()
    whole = learner(Batch(views(), torch.arange(BATCH)))["loss"]
    whole.backward()
    torch.testing.assert_close(torch.stack(losses).mean(), whole.detach())
    averaged = [torch.stack(each).mean(0) for each in zip(*gradients, strict=True)]
    torch.testing.assert_close(averaged, [weight.grad for weight in learner.encoder.parameters()])


def test_a_collapse_is_reported_while_it_lasts_and_at_the_end() -> None:
    learner = build()
    alive = float(learner(Batch(views(), torch.arange(BATCH)))["std"])
    alike = views()[:1].expand(BATCH, -1, -1, -1, -1)
    dead = float(learner(Batch(alike, torch.arange(BATCH)))["std"])
    assert not list(learner.report_warnings({"std": alive}))
    assert list(learner.report_warnings({"std": dead}))
    assert list(learner.final_warnings({"std": [alive, dead]}))


@pytest.mark.parametrize("words", [["SOLVER.GRAD_ACCUM_STEPS", "2"], ["SOLVER.BATCH_SIZE", "1"]])
def test_a_batch_without_one_variance_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=words[0].replace(".", r"\.")):
        load_config(None, ["METHOD.NAME", "vicreg", *words])
