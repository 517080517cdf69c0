"""Learning rates against the formulas of the methods' own code; which parameters decay."""

from __future__ import annotations

import math

import pytest
import torch

from kscl.engine.schedule import (
    Lars,
    build_optimizer,
    check_schedule,
    learning_rate_at,
    set_learning_rate,
    total_steps,
)
from kscl.errors import KsclError
from kscl.keys import load_config
from kscl.methods.base import build_method

TINY = ["BACKBONE.NAME", "test_resnet", "INPUT.SIZE", "32", "PROJECTOR.DIM", "8"]
TINY += ["DICTIONARY.QUEUE_LENGTH", "256"]


def rates(steps_per_epoch: int, *words: object) -> list[float]:
    cfg = load_config(None, [str(word) for word in words])
    total = cfg.SOLVER.EPOCHS * steps_per_epoch
    return [learning_rate_at(cfg, step, steps_per_epoch) for step in range(total)]


def test_the_cosine_by_epoch_is_moco_v2s():
    found = rates(5, "SOLVER.EPOCHS", 200)
    expected = [0.03 * 0.5 * (1 + math.cos(math.pi * (s // 5) / 200)) for s in range(1000)]
    assert found == pytest.approx(expected)


def test_the_step_schedule_is_moco_v1s():
    words = ["SOLVER.SCHEDULE", "step", "SOLVER.EPOCHS", 200]
    found = rates(4, *words)
    expected = [0.03 * 0.1 ** ((s // 4 >= 120) + (s // 4 >= 160)) for s in range(800)]
    assert found == pytest.approx(expected)


def test_the_cosine_by_step_falls_smoothly_to_almost_nothing():
    found = rates(10, "SOLVER.EPOCHS", 10, "SOLVER.LR_UPDATE", "iter")
    assert found[0] == 0.03
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.03 * 1e-3


@pytest.mark.parametrize("by", ["epoch", "iter"])
@pytest.mark.parametrize("warmup", [2, 0.5])
def test_the_warm_up_rises_step_by_step_to_the_full_rate_and_the_schedule_starts_there(by, warmup):
    words = ["SOLVER.WARMUP_EPOCHS", warmup, "SOLVER.EPOCHS", 8, "SOLVER.LR_UPDATE", by]
    found = rates(10, *words)
    rising = round(10 * warmup)
    assert found[:rising] == pytest.approx([0.03 * (s + 1) / rising for s in range(rising)])
    assert found[rising] == pytest.approx(0.03, rel=0.05)
    assert found[rising:] == sorted(found[rising:], reverse=True)


def test_the_rate_is_scaled_with_the_batch():
    assert rates(1, "SOLVER.BATCH_SIZE", 512)[0] == pytest.approx(0.06)
    assert rates(1, "SOLVER.BATCH_SIZE", 512, "SOLVER.SCALE_LR", False)[0] == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("name", "kind", "everything_decays"),
    [("sgd", torch.optim.SGD, True), ("adamw", torch.optim.AdamW, False), ("lars", Lars, False)],
)
def test_each_optimizer_trains_the_encoder_alone_and_decays_what_its_recipe_decays(
    name, kind, everything_decays
):
    cfg = load_config(None, [*TINY, "SOLVER.OPTIMIZER", name])
    learner = build_method(cfg)
    optimizer = build_optimizer(cfg, learner.param_groups())
    assert type(optimizer) is kind
    groups = optimizer.param_groups
    trained = {id(weight) for group in groups for weight in group["params"]}
    assert trained == {id(weight) for weight in learner.encoder.parameters()}
    decayed = [w for group in groups if group["weight_decay"] for w in group["params"]]
    if everything_decays:
        assert len(decayed) == len(trained)
    else:
        assert {w.ndim > 1 for w in decayed} == {True}
        assert len(decayed) == sum(w.ndim > 1 for w in learner.encoder.parameters())


def test_lars_adapts_matrices_and_leaves_vectors_to_plain_sgd():
    matrix = torch.nn.Parameter(torch.ones(2, 2))
    vector = torch.nn.Parameter(torch.ones(2))
    module = torch.nn.Module()
    module.matrix, module.vector = matrix, vector
    cfg = load_config(
        None,
        [
            "SOLVER.OPTIMIZER",
            "lars",
            "SOLVER.BASE_LR",
            "1.0",
            "SOLVER.MOMENTUM",
            "0",
            "SOLVER.WEIGHT_DECAY",
            "1e-9",
        ],
    )
    optimizer = build_optimizer(cfg, [{"params": [matrix, vector]}])
    matrix.grad, vector.grad = torch.full((2, 2), 0.5), torch.full((2,), 0.5)
    optimizer.step()
    assert torch.allclose(vector, torch.full((2,), 0.5))  # 1 - 1.0 * 0.5
    trust = 0.001 * 2.0 / 1.0  # coefficient * |weights| / |gradients|
    assert torch.allclose(matrix, torch.full((2, 2), 1 - trust * 0.5))


def test_the_rate_is_set_for_every_group():
    cfg = load_config(None, [*TINY, "SOLVER.OPTIMIZER", "adamw"])
    group = {"params": [torch.nn.Parameter(torch.ones(2, 2))]}
    optimizer = build_optimizer(cfg, [*build_method(cfg).param_groups(), {**group, "lr_scale": 10}])
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25, 2.5]


def test_a_number_of_steps_replaces_the_epochs_and_the_cosine_spans_it():
    words = ["SOLVER.LR_UPDATE", "iter", "SOLVER.WARMUP_EPOCHS", "0.5"]
    by_steps = load_config(None, [*words, "SOLVER.MAX_STEPS", "25"])
    assert total_steps(by_steps, 10) == 25
    rates = [learning_rate_at(by_steps, step, 10) for step in range(25)]
    expected = [0.03 * 0.5 * (1 + math.cos(math.pi * (step - 5) / 20)) for step in range(5, 25)]
    assert rates[5:] == pytest.approx(expected)
    by_epochs = load_config(None, [*words, "SOLVER.EPOCHS", "2"])
    same = load_config(None, [*words, "SOLVER.MAX_STEPS", "20"])
    assert [learning_rate_at(by_epochs, step, 10) for step in range(20)] == [
        learning_rate_at(same, step, 10) for step in range(20)
    ]
    check_schedule(by_steps, 10)
    with pytest.raises(KsclError, match="WARMUP_EPOCHS"):
        check_schedule(by_steps, 50)


def test_a_milestone_that_the_steps_do_not_reach_is_an_error():
    words = ["SOLVER.SCHEDULE", "step", "SOLVER.MILESTONES", "[3, 5]", "SOLVER.WARMUP_EPOCHS", "0"]
    by_steps = load_config(None, [*words, "SOLVER.MAX_STEPS", "60"])
    check_schedule(by_steps, 10)
    with pytest.raises(KsclError, match=r"MILESTONES 5 is not inside .* 60 steps .* 5 epochs"):
        check_schedule(by_steps, 12)
