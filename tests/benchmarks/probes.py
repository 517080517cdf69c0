"""Figures of the probes that many fits are made for."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.exceptions import ConvergenceWarning
from sklearn.svm import LinearSVC

from kscl.rng import Stream, permutation
from linear_eval.images import PRESENT
from linear_eval.linear import Rows, new_head, solutions_of, standardized, start_grid
from linear_eval.probe import load_linear_eval_config
from linear_eval.probes.segmentation import VOID, train_maps
from linear_eval.probes.svm import Machines, drawn_images
from linear_eval.score import interpolated_precision
from tests.benchmarks.harness import figure, seconds, time_ratio

CLASSES, IMAGES, TEST_IMAGES, DIM = 20, 5011, 1000, 2048
TIMED_FITS = 40
COMPARED_SHOTS = (2, 8)  # the plain loop takes hours over all of them


def features_and_labels(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rectified features of length 1, and one or more classes per image that overlap in them."""
    centers = np.random.default_rng(0).gamma(0.5, size=(CLASSES, DIM))
    rng = np.random.default_rng(seed)
    labels = rng.random((count, CLASSES)) < 0.04
    labels[np.arange(count), rng.integers(0, CLASSES, count)] = True
    table = 0.25 * (labels @ centers) + rng.gamma(0.5, size=(count, DIM))
    return table / np.linalg.norm(table, axis=1, keepdims=True), labels.astype(np.int64)


def drawn(labels: np.ndarray, number: int, k: int, sample: int) -> np.ndarray:
    """Return the images of one low-shot problem, as the probe draws them."""
    return drawn_images(labels, 0, sample, k, number)


def plain_fit(features: np.ndarray, labels: np.ndarray, cost: float) -> LinearSVC:
    machine = LinearSVC(
        C=cost, class_weight={1: 2, -1: 1}, dual=True, tol=1e-4, max_iter=2000, random_state=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return machine.fit(features, labels)


@figure(
    "low_shot_svm",
    "time of scikit-learn's fits in a plain loop (40 of them, spread over k and C, scaled up) over "
    "the low-shot suite; 8 k x 5 samples x 20 classes, 5,011 x 2,048 features; equal mAP to 0.1",
    at_least=5,
)
def low_shot_svm() -> float:
    torch.set_num_threads(2)
    cfg = load_linear_eval_config("linear_eval/voc07_low_shot_svm.yaml")
    table, labels = features_and_labels(IMAGES, 1)
    test = features_and_labels(TEST_IMAGES, 2)
    shots, samples = list(cfg.LOW_SHOT.K), range(cfg.LOW_SHOT.SAMPLES)

    def ours() -> None:
        machines = Machines(cfg, table, labels)
        for sample, k in itertools.product(samples, shots):
            machines.train([(c, drawn(labels, c, k, sample)) for c in range(CLASSES)], k)

    spent = seconds(ours)
    _check_equal(cfg, table, labels, test)
    return _plain_seconds(cfg, table, labels) / spent


def _plain_seconds(cfg, table: np.ndarray, labels: np.ndarray) -> float:  # type: ignore[no-untyped-def]
    """Time TIMED_FITS fits, 5 costs for each k, and scale them up to all folds and refits."""
    costs, total = cfg.SVM.COSTS, 0.0
    timed = [costs[i] for i in np.linspace(0, len(costs) - 1, TIMED_FITS // len(cfg.LOW_SHOT.K))
             .round().astype(int)]  # fmt: skip
    for number, k in enumerate(cfg.LOW_SHOT.K):
        rows = drawn(labels, number, k, 0)
        folds = min(cfg.SVM.FOLDS, k) if k > 1 else 0
        kept = rows[np.arange(len(rows)) % folds > 0] if folds else rows
        signs = np.where(labels[kept, number] == PRESENT, 1, -1)
        spent = [seconds(lambda x=kept, y=signs, c=c: plain_fit(table[x], y, c)) for c in timed]
        fits = folds * len(costs) + 1
        total += float(np.mean(spent)) * fits * CLASSES * cfg.LOW_SHOT.SAMPLES
    return total


def _check_equal(cfg, table, labels, test) -> None:  # type: ignore[no-untyped-def]
    """Compare the mAP of both routes, costs chosen by each for itself, on one draw of some k."""
    for k in COMPARED_SHOTS:
        found = {}
        for solver in ("exact", "liblinear"):
            words = ["SVM.SOLVER", solver]
            given = load_linear_eval_config("linear_eval/voc07_low_shot_svm.yaml", words)
            machines = Machines(given, table, labels)
            problems = [(c, drawn(labels, c, k, 0)) for c in range(CLASSES)]
            weights = [chosen.weight for chosen in machines.train(problems, k)]
            found[solver] = 100 * np.mean(
                [
                    interpolated_precision(test[1][:, c] == PRESENT, test[0] @ w[:-1] + w[-1])
                    for c, w in enumerate(weights)
                ]
            )
        difference = abs(found["exact"] - found["liblinear"])
        assert difference <= 0.1, f"k = {k}: the mAP differs by {difference:.3f}"


def segmentation_ratio(rates: tuple[float, ...]) -> float:
    """Return the time of one plain PyTorch loop per learning rate over that of the probe's grid.

    One epoch on maps of 16 images, as of a ViT-S/16 at 512 pixels; equal weights to 0.001.
    """
    torch.set_num_threads(2)
    classes, images, side, dim, size = 21, 16, 32, 384, 128
    words = ["SOLVER.EPOCHS", "1", "SOLVER.MILESTONES", "[]", "SOLVER.BATCH_SIZE", "8"]
    solver = load_linear_eval_config(None, words).SOLVER
    random = torch.Generator().manual_seed(0)
    table = torch.randn(images * side * side, dim, generator=random)
    targets = torch.randint(0, classes, (images, 8, 8), generator=random).to(torch.uint8)
    targets = F.interpolate(targets[None], (size, size))[0]
    targets[:, :4] = VOID
    rows = standardized(Rows(table, np.arange(len(table))[None], torch.empty(0)))
    assert rows.center is not None
    assert rows.scale is not None
    center, scale = rows.center[:, None, None], rows.scale[:, None, None]
    maps = table.view(images, side, side, dim).permute(0, 3, 1, 2).contiguous()
    order = torch.from_numpy(permutation(0, 0, Stream.ORDER, images))
    start = new_head(classes, dim, 0.01, 0)

    def ours() -> list[torch.Tensor]:
        state = start_grid(len(rates), classes, dim, 0.01, 0, torch.device("cpu"))
        points = [{"lr": lr, "weight_decay": 0.0} for lr in rates]
        list(train_maps(rows, targets, points, state, solver, 0))
        return [weight for weight, _ in solutions_of(state, len(rates))]

    def plain() -> list[torch.Tensor]:
        found = []
        for lr in rates:
            conv = torch.nn.Conv2d(dim, classes, 1)
            conv.load_state_dict({"weight": start[0][:, :, None, None], "bias": start[1]})
            sgd = torch.optim.SGD(conv.parameters(), lr, momentum=solver.MOMENTUM)
            for batch in order.split(solver.BATCH_SIZE):
                outputs = conv((maps[batch] - center) * scale)
                outputs = F.interpolate(outputs, (size, size), mode="bilinear")
                loss = F.cross_entropy(outputs, targets[batch].long(), ignore_index=VOID)
                sgd.zero_grad()
                loss.backward()
                sgd.step()
            found.append(conv.weight.detach().flatten(1))
        return found

    for mine, theirs in zip(ours(), plain(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-3)
    return time_ratio(plain, ours, rounds=5)


@figure(
    "segmentation_one_rate",
    "time of a plain PyTorch loop (1x1 conv, interpolate, cross-entropy) over the segmentation "
    "probe, one learning rate, the same features",
    at_least=1,
    alone=True,
)
def segmentation_one_rate() -> float:
    return segmentation_ratio((0.1,))


@figure(
    "segmentation_grid",
    "the same with the five learning rates of the default grid, one loop for each",
    at_least=1,
    alone=True,
)
def segmentation_grid() -> float:
    return segmentation_ratio((0.01, 0.03, 0.1, 0.3, 1.0))
