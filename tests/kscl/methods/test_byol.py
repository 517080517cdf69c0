"""BYOL against its formulas written out, and its own check for a collapse."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from kscl.keys import load_config
from kscl.methods.base import build_method
from kscl.methods.byol import BYOL, byol_loss
from kscl.methods.keys import method_of
from kscl.views.batch import Batch

pytestmark = pytest.mark.portable

WORDS = ["METHOD.NAME", "byol", "BACKBONE.NAME", "test_resnet", "INPUT.SIZE", "32"]
WORDS += ["PROJECTOR.TYPE", "mlp_bn", "PROJECTOR.DIM", "8", "METHOD.PREDICTOR_DIM", "16"]


def build(*words: str) -> BYOL:
    torch.manual_seed(0)
    built = build_method(load_config(None, [*WORDS, *words]))
    assert isinstance(built, BYOL)
    return built


def batch(seed: int = 0) -> Batch:
    views = torch.rand(6, 2, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    return Batch(views, torch.arange(6))


def test_the_loss_is_the_squared_distance_of_unit_vectors_in_both_directions() -> None:
    predictions, targets = torch.randn(2, 5, 2, 7, dtype=torch.float64)

    def distance(prediction: Tensor, target: Tensor) -> float:
        p, t = (x / math.sqrt(sum(float(v) ** 2 for v in x)) for x in (prediction, target))
        return sum(float(a - b) ** 2 for a, b in zip(p, t, strict=True))

    each = [
        distance(predictions[n, 0], targets[n, 1]) + distance(predictions[n, 1], targets[n, 0])
        for n in range(5)
    ]
    assert float(byol_loss(predictions, targets)) == pytest.approx(sum(each) / 5)


def test_only_the_online_network_has_a_gradient() -> None:
    learner = build()
    learner(batch())["loss"].backward()
    trained = [*learner.encoder.parameters(), *learner.predictor.parameters()]
    assert all(weight.grad is not None for weight in trained)
    assert all(weight.grad is None for weight in learner.target.parameters())
    groups = learner.param_groups()
    assert {id(w) for group in groups for w in group["params"]} == {id(w) for w in trained}


@pytest.mark.parametrize("progress", [0.0, 0.25, 1.0])
def test_the_target_follows_with_a_momentum_that_rises_to_one(progress: float) -> None:
    learner = build("METHOD.MOMENTUM", "0.9")
    before = copy.deepcopy(learner.target)
    torch.testing.assert_close(list(before.parameters()), list(learner.encoder.parameters()))
    with torch.no_grad():
        for weight in learner.encoder.parameters():
            weight.add_(1)
    learner.after_step(progress)
    tau = 1 - (1 - 0.9) * (math.cos(math.pi * progress) + 1) / 2
    expected = [
        tau * old + (1 - tau) * new
        for old, new in zip(before.parameters(), learner.encoder.parameters(), strict=True)
    ]
    torch.testing.assert_close(list(learner.target.parameters()), expected)


def test_a_collapse_is_reported_while_it_lasts_and_at_the_end() -> None:
    learner = build()
    alive = float(learner(batch())["spread"])
    assert not list(learner.report_warnings({"spread": alive}))
    with torch.no_grad():
        learner.encoder.head[-1].weight.zero_()  # type: ignore[index, operator, union-attr]
        learner.encoder.head[-1].bias.fill_(1)  # type: ignore[index, operator, union-attr]
    spread = float(learner(batch())["spread"])
    assert list(learner.report_warnings({"spread": spread}))
    assert list(learner.final_warnings({"spread": [alive, spread]}))
    assert not list(learner.final_warnings({"spread": [spread, alive]}))


def test_a_step_costs_two_passes_with_and_two_without_a_gradient() -> None:
    cfg = load_config(None, WORDS)
    assert method_of(cfg).passes(cfg) == (2, 2)
    assert method_of(cfg).extras(cfg).flops == 2 * 2 * 3 * (8 * 16 + 16 * 8)
