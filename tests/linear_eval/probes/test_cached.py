"""The grid trained together is the points trained alone; the choice never sees val."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from kscl.errors import KsclError
from linear_eval.features import Features
from linear_eval.images import LabeledImages, hold_out
from linear_eval.linear import (
    Rows,
    chunks_of,
    epoch_batches,
    fit_logistic,
    new_head,
    objective,
    outputs_of,
    rate_factor,
    solutions_of,
    standardized,
    start_grid,
    train_grid,
)
from linear_eval.probe import load_linear_eval_config
from linear_eval.probes.cached import Cached, better, choose

CPU = torch.device("cpu")
# Near the optimum the objective is flat: two solvers that reach it to 1e-7 give outputs that differ
# by up to 0.13 (at l2 = 1e-4), while the closest two classes of an image are 0.01 apart.
CLEAR = 0.5
POINTS = [{"lr": lr, "weight_decay": wd} for lr in (0.01, 0.1, 1.0) for wd in (0.0, 0.01)]


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Real features: the pixels of handwritten digits (1797, 64), and their classes."""
    data = load_digits()
    return torch.from_numpy(data.data).float(), torch.from_numpy(data.target)


def rows_of(digits, first=0, last=1000, views=1) -> Rows:
    features, labels = digits
    table = torch.cat([features, features.flip(1)])
    indices = np.arange(first, last) + np.arange(views)[:, None] * len(features)
    return Rows(table, indices, labels[first:last])


def solver(*more: str):
    words = ["SOLVER.EPOCHS", "6", "SOLVER.MILESTONES", "[3, 5]", "SOLVER.BATCH_SIZE", "64", *more]
    return load_linear_eval_config(None, words).SOLVER


def train(rows, points, settings, seed=0):
    state = start_grid(len(points), 10, rows.table.shape[1], 0.01, seed, CPU)
    list(train_grid(rows, points, state, settings, seed))
    return state


@pytest.mark.portable
@pytest.mark.parametrize("schedule", ["step", "cosine"])
def test_points_trained_together_are_those_trained_by_torchs_sgd_alone(digits, schedule):
    rows = standardized(rows_of(digits, views=2))
    settings = solver("SOLVER.SCHEDULE", schedule)
    together = solutions_of(train(rows, POINTS, settings, seed=3), len(POINTS))
    for point, (weight, bias) in zip(POINTS, together, strict=True):
        head = torch.nn.Linear(64, 10)
        head.load_state_dict(dict(zip(("weight", "bias"), new_head(10, 64, 0.01, 3), strict=True)))
        sgd = torch.optim.SGD(
            head.parameters(), point["lr"], 0.9, weight_decay=point["weight_decay"]
        )
        for epoch in range(settings.EPOCHS):
            sgd.param_groups[0]["lr"] = point["lr"] * rate_factor(settings, epoch)
            for indices, labels in epoch_batches(rows, 64, 3, epoch, CPU):
                loss = F.cross_entropy(head(rows.take(indices)), labels)
                sgd.zero_grad()
                loss.backward()
                sgd.step()
        torch.testing.assert_close(weight, head.weight.detach(), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(bias, head.bias.detach(), rtol=1e-3, atol=1e-4)


def test_an_epoch_shows_every_image_once_in_one_of_its_views(digits):
    rows = rows_of(digits, views=2)
    epochs = [epoch_batches(rows, 64, 3, epoch, CPU) for epoch in (0, 1)]
    (first, labels), (second, _) = (map(torch.cat, zip(*epoch, strict=True)) for epoch in epochs)
    images = len(digits[0])
    for found in (first, second):
        assert sorted((found % images).tolist()) == list(range(len(rows)))
        assert 400 < int((found >= images).sum()) < 600  # either view
    assert torch.equal(labels, digits[1][first % images])
    assert not torch.equal(first, second)


def test_a_point_that_diverges_harms_no_other(digits):
    rows = rows_of(digits)
    points = [{"lr": lr, "weight_decay": 0.0} for lr in (0.001, 1e38)]
    together = train(rows, points, solver())["losses"][-1]
    alone = train(rows, points[:1], solver())["losses"][-1]
    assert not np.isfinite(together[1])
    assert together[0] == pytest.approx(alone[0], rel=1e-5)


def test_standardized_features_have_mean_0_and_variance_1_and_dead_ones_are_0(digits):
    rows = standardized(rows_of(digits))
    features = rows.take(torch.from_numpy(rows.indices[0])).double()
    alive = features.std(0) > 0
    assert 0 < (~alive).sum() < 20  # corner pixels are always white
    assert features.mean(0).abs().max() < 1e-5
    torch.testing.assert_close(
        features.std(0, correction=0)[alive],
        torch.ones(int(alive.sum())).double(),
        rtol=1e-4,
        atol=0,
    )


def test_logistic_regression_is_scikit_learns(digits):
    rows = standardized(rows_of(digits, 0, 1200))
    features = rows.take(torch.from_numpy(rows.indices[0]))
    test = rows_of(digits, 1200, 1797)
    test = Rows(test.table, test.indices, test.labels, rows.center, rows.scale)
    tested = test.take(torch.from_numpy(test.indices[0]))
    for l2 in (1e-1, 1e-3, 1e-4):
        weight, bias, reached = fit_logistic(rows, 10, l2, 1000, CPU)
        theirs = LogisticRegression(C=1 / (l2 * len(rows)), max_iter=5000, tol=1e-8)
        theirs.fit(features.numpy(), rows.labels.numpy())
        found = (torch.from_numpy(v).float() for v in (theirs.coef_, theirs.intercept_))
        assert reached <= float(objective(chunks_of(rows, CPU), *found, l2)[0]) + 1e-5
        ours = outputs_of(test, weight, bias)  # (597, 10)
        expected = torch.from_numpy(theirs.decision_function(tested.numpy()))  # (597, 10)
        best = expected.topk(2, dim=1).values  # (597, 2)
        clear = best[:, 0] - best[:, 1] > CLEAR  # (597,)
        assert clear.double().mean() > 0.85
        assert torch.equal(ours.argmax(1)[clear], expected.argmax(1)[clear])


def test_the_gradient_of_logistic_regression_is_autograds(digits):
    rows = standardized(rows_of(digits, 0, 300, views=2))
    weight, bias = new_head(10, 64, 0.1, 0)
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    features = rows.take(torch.from_numpy(rows.indices.reshape(-1)))
    loss = F.cross_entropy(F.linear(features, weight, bias), rows.labels.repeat(2))
    total = loss + 0.05 / 2 * weight.square().sum()
    total.backward()
    found, weight_grad, bias_grad = objective(
        chunks_of(rows, CPU), weight.detach(), bias.detach(), 0.05
    )
    assert found.item() == pytest.approx(total.item(), rel=1e-5)
    torch.testing.assert_close(weight_grad, weight.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(bias_grad, bias.grad, rtol=1e-4, atol=1e-6)


def probe_of_pixels(digits, val_labels=None, *more: str) -> Cached:
    """A cached probe of the pixels: 1000 digits to train on, the rest is val."""
    features, labels = digits
    words = ["PROBE", "cached", "SOLVER.EPOCHS", "4", "SOLVER.SCHEDULE", "cosine"]
    cfg = load_linear_eval_config(None, [*words, "CACHED.VIEWS", "[center]", *more])
    names = [str(number) for number in range(10)]
    val_labels = labels[1000:] if val_labels is None else val_labels
    probe, parts = Cached(cfg), (slice(0, 1000), slice(1000, None))
    probe.data = {
        role: LabeledImages(None, names, np.arange(len(part)), part.numpy(), {})
        for role, part in (("train", labels[:1000]), ("val", val_labels))
    }
    probe.features = {
        role: Features(features[part], len(features[part]))
        for role, part in zip(("train", "val"), parts, strict=True)
    }
    probe.resume({})
    return probe


def probed(digits, val_labels=None, *more: str):
    probe = probe_of_pixels(digits, val_labels, *more)
    list(probe.fit())
    (outcome,) = probe.outcomes()
    return outcome


@pytest.mark.parametrize("method", ["sgd", "lbfgs"])
def test_the_choice_does_not_depend_on_val(digits, method):
    wrong = (digits[1][1000:] + 1) % 10
    right, misled = (probed(digits, labels, "CACHED.METHOD", method) for labels in (None, wrong))
    assert right.details["sweep"] == misled.details["sweep"]
    assert right.details["chosen"] == misled.details["chosen"]
    assert torch.equal(right.classifier[0], misled.classifier[0])
    assert right.score.metrics["top1"] > 85


def test_the_best_point_on_held_out_images_becomes_a_classifier_of_features_as_they_come(digits):
    outcome = probed(digits)
    sweep = outcome.details["sweep"]
    assert len(sweep) == 16
    (chosen,) = [row for row in sweep if row["chosen"]]
    assert chosen["held_out_top1"] == max(row["held_out_top1"] for row in sweep)
    features, labels = digits[0][1000:], digits[1][1000:]
    outputs = F.linear(features, *outcome.classifier)
    top1 = 100 * float((outputs.argmax(1) == labels).double().mean())
    assert top1 == pytest.approx(outcome.score.metrics["top1"])


def test_points_are_compared_on_train_images_that_they_were_not_trained_on(digits):
    features, labels = digits
    words = ["PROBE", "cached", "SOLVER.EPOCHS", "4", "SOLVER.SCHEDULE", "cosine"]
    kept, held = hold_out(labels[:1000].numpy(), 0.1, 0)
    rows = standardized(Rows(features, kept[None], labels[torch.from_numpy(kept)]))
    test = replace(rows, indices=held[None], labels=labels[torch.from_numpy(held)])
    settings = load_linear_eval_config(None, words).SOLVER
    for row in probed(digits).details["sweep"][::5]:
        trained = train(rows, [row], settings)
        outputs = outputs_of(test, *solutions_of(trained, 1)[0])
        assert row["held_out_loss"] == pytest.approx(
            F.cross_entropy(outputs, test.labels).item(), rel=1e-3
        )
        assert row["train_loss"] == pytest.approx(trained["losses"][-1][0], rel=1e-3)


def test_the_best_point_is_chosen_never_a_diverged_one_and_among_equals_that_of_the_lowest_loss():
    good = [{"held_out_top1": 10.0, "held_out_loss": n, "diverged": False} for n in (2.0, 1.0, 3.0)]
    bad = {"held_out_top1": None, "held_out_loss": None, "diverged": True}
    assert choose([bad, *good, bad], better, "CACHED.LRS") == 2
    assert choose([*good, good[0] | {"held_out_top1": 11.0}], better, "CACHED.LRS") == 3
    with pytest.raises(KsclError, match=r"CACHED\.LRS"):
        choose([bad, bad], better, "CACHED.LRS")


@pytest.mark.parametrize(
    ("key", "values", "named"),
    [
        ("L2", "[1000.0, 10.0, 100.0]", ["l2 10 ", "CACHED.L2 [10, 100, 1000]", "smaller"]),
        ("L2", "[1e-7, 2e-7, 3e-7]", []),  # flat: whichever end is best, it is by chance
        ("LRS", "[1e-7, 1e-5, 1e-3]", ["lr 0.001 ", "CACHED.LRS [1e-07, 1e-05, 0.001]", "larger"]),
    ],
)
def test_an_edge_is_a_warning_only_if_it_is_better_by_more_than_noise(digits, key, values, named):
    words = ["CACHED.METHOD", "lbfgs"] if key == "L2" else ["CACHED.WEIGHT_DECAYS", "[0.0]"]
    found = probed(digits, None, *words, f"CACHED.{key}", values).details
    assert len(found["warnings"]) == bool(named)
    for words in named:
        assert words in found["warnings"][0]


def test_lbfgs_walks_from_strong_to_weak_regularization():
    cfg = load_linear_eval_config(
        None, ["CACHED.METHOD", "lbfgs", "CACHED.L2", "[1e-4, 0.1, 1e-2]"]
    )
    assert [point["l2"] for point in Cached(cfg).points()] == [0.1, 1e-2, 1e-4]


@pytest.mark.parametrize(
    ("method", "last"), [("sgd", 2), ("sgd", 4), ("sgd", 5), ("lbfgs", 2), ("lbfgs", 4)]
)  # in the grid, at its end, in the refit
def test_a_stopped_grid_goes_on_to_the_same_number(digits, method, last):
    words = ("CACHED.METHOD", method, "CACHED.L2", "[1e-3, 1e-2, 1e-1, 1.0]")
    stopped, resumed, undisturbed = (probe_of_pixels(digits, None, *words) for _ in range(3))
    for step in stopped.fit():
        if step == last:
            break
    saved = copy.deepcopy(stopped.state_dict())
    assert bool(saved["sweep"]) == (last > 4)
    resumed.resume(saved)
    assert all(step > last for step in resumed.fit())
    list(undisturbed.fit())
    (found,), (expected,) = resumed.outcomes(), undisturbed.outcomes()
    assert found.score == expected.score
    assert found.details == expected.details
