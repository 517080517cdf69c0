"""The cached probe: a grid trained at once on stored features, its point chosen within train.

1. A fraction of train is held out, class by class.
2. All points of the grid are trained on the rest, together.
3. The point that is best on the held-out images is trained again on all of train.
4. Val is used once, at the end.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor

from kscl.runtime.logs import LOGGER, SECONDS_BETWEEN_LINES
from linear_eval.checkpoint import Saver
from linear_eval.data.feature_sets import FeatureSets
from linear_eval.data.features import Features
from linear_eval.data.images import LabeledImages
from linear_eval.data.views import cached_views, slot
from linear_eval.errors import LinearEvalError
from linear_eval.probes.lbfgs import fit_logistic
from linear_eval.probes.outcome import Classifier, Outcome
from linear_eval.probes.sgd_grid import (
    GridState,
    Point,
    Rows,
    outputs_of,
    standardized,
    start_training,
    train_points,
)
from linear_eval.rules import CENTER
from linear_eval.score import ranked_classes, score
from linear_eval.splits import hold_out

log = logging.getLogger(LOGGER)

Json = dict[str, Any]
GRID, REFIT = "grid", "refit"


@dataclass(frozen=True)
class Fitted:
    """A trained point: a classifier on the (standardized) rows, and its training loss per epoch."""

    weight: Tensor  # (C, D)
    bias: Tensor  # (C,)
    losses: list[float]


# Trains points on rows; the stage and the sweep so far are saved in its checkpoints.
Solver = Callable[[Rows, Sequence[Point], str, list[Json]], list[Fitted]]


def probe_cached(
    cfg: CfgNode, sets: FeatureSets, device: torch.device, saver: Saver, saved: Json | None
) -> Outcome:
    """Choose a point of the grid within train, train it on all of train and score it on val."""
    train, val, train_features, val_features = sets
    solve = _sgd(cfg, len(train.classes), device, saver, saved)
    if cfg.CACHED.METHOD == "lbfgs":
        solve = _lbfgs(cfg, len(train.classes), device, saver, saved)
    views = cached_views(cfg)
    points = grid_points(cfg)
    if saved is not None and saved["stage"] == REFIT:
        sweep = saved["sweep"]
    else:
        sweep = _sweep(cfg, train, train_features, views, points, solve)
    chosen = points[choose(sweep)]
    rows = training_rows(cfg, train_features, train.labels, np.arange(len(train)), views)
    (fitted,) = solve(rows, [chosen], REFIT, sweep)
    at_edge = edge_warnings(cfg, points, chosen)
    for words in at_edge:
        log.warning("The best point is not sure: %s. Widen the grid.", words)
    test = rows_like(rows, val_features, val.labels, np.arange(len(val)))
    outputs = outputs_of(test, fitted.weight, fitted.bias)
    details: Json = {
        "sweep": sweep,
        "chosen": _in_names(cfg, chosen),
        "chosen_on": f"{cfg.CACHED.HOLD_OUT:g} of train, held out; then trained on all of train",
        "warnings": at_edge,
        "val_loss": float(F.cross_entropy(outputs, val.targets)),
        "curves": {
            "epoch": list(range(1, len(fitted.losses) + 1)),
            "train_loss": fitted.losses,
        },
    }
    return Outcome(
        score(ranked_classes(outputs), val.targets, val.classes),
        details,
        f"{_in_words(cfg, chosen)}, chosen of {len(points)} within train",
        _on_raw_features(fitted, rows),
    )


def grid_points(cfg: CfgNode) -> list[Point]:
    """Return the points of the grid that the config describes."""
    if cfg.CACHED.METHOD == "lbfgs":
        # From strong to weak: each solution is then close to the next.
        return [Point(0.0, l2) for l2 in sorted(cfg.CACHED.L2, reverse=True)]
    return [Point(*pair) for pair in itertools.product(cfg.CACHED.LRS, cfg.CACHED.WEIGHT_DECAYS)]


def choose(sweep: Sequence[Json]) -> int:
    """Return the point with the best held-out top-1, among equals the one with the lowest loss."""
    if len(sweep) < 2:
        return 0
    usable = [number for number, row in enumerate(sweep) if not row["diverged"]]
    if not usable:
        raise LinearEvalError("Every point of the grid diverged. Lower CACHED.LRS.")
    return max(usable, key=lambda n: (sweep[n]["held_out_top1"], -sweep[n]["held_out_loss"], -n))


def training_rows(
    cfg: CfgNode, features: Features, labels: np.ndarray, images: np.ndarray, views: Sequence[str]
) -> Rows:
    """Return the chosen images in all views, standardized by themselves if the config says so."""
    indices = np.stack([slot(view) * features.count + images for view in views])
    rows = Rows(features.rows, indices, torch.from_numpy(labels[images]))
    return standardized(rows) if cfg.CACHED.STANDARDIZE else rows


def rows_like(rows: Rows, features: Features, labels: np.ndarray, images: np.ndarray) -> Rows:
    """Return center crops of images to test on, standardized as the training rows were."""
    indices = (slot(CENTER) * features.count + images)[None]
    targets = torch.from_numpy(labels[images])
    return replace(rows, table=features.rows, indices=indices, labels=targets)


def _sweep(
    cfg: CfgNode,
    train: LabeledImages,
    features: Features,
    views: Sequence[str],
    points: Sequence[Point],
    solve: Solver,
) -> list[Json]:
    """Return one row per point: its settings and its scores on the held-out part of train."""
    if len(points) == 1:
        return [_in_names(cfg, points[0]) | {"chosen": True, "diverged": False}]
    kept, held = hold_out(train.labels, cfg.CACHED.HOLD_OUT, cfg.SEED)
    if not len(held):
        raise LinearEvalError(
            "One train image per class leaves none to choose a point of the grid on. Use more "
            "images, or a grid of one point (CACHED.LRS, CACHED.WEIGHT_DECAYS, CACHED.L2)."
        )
    rows = training_rows(cfg, features, train.labels, kept, views)
    test = rows_like(rows, features, train.labels, held)
    sweep = []
    for point, fitted in zip(points, solve(rows, points, GRID, []), strict=True):
        outputs = outputs_of(test, fitted.weight, fitted.bias)
        loss = float(F.cross_entropy(outputs, test.labels))
        diverged = not (math.isfinite(loss) and math.isfinite(fitted.losses[-1]))
        hits = (outputs.argmax(1) == test.labels).sum()
        sweep.append(
            _in_names(cfg, point)
            | {
                "held_out_top1": None if diverged else 100 * int(hits) / len(held),
                "held_out_loss": None if diverged else loss,
                "train_loss": None if diverged else fitted.losses[-1],
                "diverged": diverged,
                "chosen": False,
            }
        )
    best = choose(sweep)
    sweep[best]["chosen"] = True
    words = _in_words(cfg, points[best])
    log.info("%s: The best of %d on %d held-out train images.", words, len(points), len(held))
    return sweep


def _sgd(
    cfg: CfgNode, classes: int, device: torch.device, saver: Saver, saved: Json | None
) -> Solver:
    def solve(rows: Rows, points: Sequence[Point], stage: str, sweep: list[Json]) -> list[Fitted]:
        dim, std = rows.table.shape[1], cfg.SOLVER.INIT_STD
        training = start_training(len(points), classes, dim, std, cfg.SEED, device)
        if saved is not None and saved["stage"] == stage:
            training = GridState(**saved["training"]).to(device)
        before = cfg.SOLVER.EPOCHS if stage == REFIT else 0
        last_line = time.monotonic()

        def after_epoch(training: GridState) -> None:
            def content() -> Json:
                return {"stage": stage, "sweep": sweep, "training": training.state_dict()}

            nonlocal last_line
            done = len(training.losses)
            if time.monotonic() - last_line > SECONDS_BETWEEN_LINES:
                last_line = time.monotonic()
                log.info("%s: Epoch %d of %d.", stage, done, cfg.SOLVER.EPOCHS)
            saver.offer(before + done, content)

        training = train_points(rows, points, training, cfg.SOLVER, cfg.SEED, after_epoch)
        weights, biases = training.classifiers(len(points))
        losses = zip(*training.losses, strict=True)
        return [Fitted(w, b, list(c)) for w, b, c in zip(weights, biases, losses, strict=True)]

    return solve


def _lbfgs(
    cfg: CfgNode, classes: int, device: torch.device, saver: Saver, saved: Json | None
) -> Solver:
    def solve(rows: Rows, points: Sequence[Point], stage: str, sweep: list[Json]) -> list[Fitted]:
        found: list[Fitted] = []
        if saved is not None and saved["stage"] == stage:
            found = [Fitted(**fitted) for fitted in saved["fitted"]]
        before = len(cfg.CACHED.L2) if stage == REFIT else 0

        def content() -> Json:
            return {"stage": stage, "sweep": sweep, "fitted": [vars(fitted) for fitted in found]}

        for point in points[len(found) :]:
            start = (found[-1].weight, found[-1].bias) if found else None
            weight, bias, reached = fit_logistic(
                rows, classes, point.weight_decay, cfg.CACHED.LBFGS_ITERATIONS, device, start
            )
            found.append(Fitted(weight, bias, [reached]))
            saver.offer(before + len(found), content)
        return found

    return solve


def _in_names(cfg: CfgNode, point: Point) -> Json:
    return {"l2": point.weight_decay} if cfg.CACHED.METHOD == "lbfgs" else point._asdict()


def _in_words(cfg: CfgNode, point: Point) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in _in_names(cfg, point).items())


def edge_warnings(cfg: CfgNode, points: Sequence[Point], chosen: Point) -> list[str]:
    """Return the settings whose best value ends its range: a better one may lie beyond it."""
    found = []
    for name, value in _in_names(cfg, chosen).items():
        values = sorted({_in_names(cfg, point)[name] for point in points})
        ends = [end for end in (values[0], values[-1]) if end > 0]  # nothing lies beyond 0
        if len(values) > 2 and value in ends:
            found.append(f"{name} {value:g} at the edge of its grid")
    return found


def _on_raw_features(fitted: Fitted, rows: Rows) -> Classifier:
    """Return the same classifier on features as the backbone gives them: W (x − m) s + b."""
    weight, bias = fitted.weight.double().cpu(), fitted.bias.double().cpu()
    if rows.center is not None and rows.scale is not None:
        weight = weight * rows.scale
        bias = bias - weight @ rows.center.double()
    return Classifier(weight.float(), bias.float())
