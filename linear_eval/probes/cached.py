"""The cached probe: a grid of linear classifiers on stored features, chosen within train.

1. A fraction of train is held out, class by class.
2. All points of the grid are trained on the rest, by SGD or L-BFGS.
3. The best point on the held-out images is trained again on all of train.
4. Val is used once, at the end.

A warning says if the best point is at the edge of its range and clearly better than its neighbor: a
value outside the range may be better still.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor

from kscl.config import Broken, Section, key
from kscl.errors import KsclError
from kscl.run.task import task
from kscl.runtime.distributed import device
from kscl.runtime.logs import LOGGER, progress
from linear_eval.config import CENTER, FLIP
from linear_eval.images import FIXED_CROP, LabeledImages, hold_out, slot
from linear_eval.linear import (
    Point,
    Rows,
    Solution,
    fit_logistic,
    on_raw_features,
    outputs_of,
    solutions_of,
    standardized,
    start_grid,
    train_grid,
)
from linear_eval.probe import VIEW_WORDS, Json, Probe, random_crop_words, schedule_words
from linear_eval.score import ACCURACY, Outcome, beside_end, beyond_noise, ranked_classes, score

log = logging.getLogger(LOGGER)

KEYS = {"lr": "LRS", "weight_decay": "WEIGHT_DECAYS", "l2": "L2"}  # of CACHED


class GridProbe(Probe):
    """Train a grid on a part of train, then the best point on all of it."""

    sweep: list[Json]  # a row per point of the grid, once it is done
    training: Json  # the state of SGD on the grid, then on the chosen point
    found: list[Solution]  # by the solver so far

    def points(self) -> list[Point]:
        raise NotImplementedError

    def split(self, train: LabeledImages) -> tuple[np.ndarray, np.ndarray]:
        """Return the images that the grid is trained on, and those that it is compared on."""
        raise NotImplementedError

    def solve(self, images: np.ndarray, points: Sequence[Point]) -> Iterator[int]:
        """Train points on images of train into `self.found`, continuing from a checkpoint."""
        raise NotImplementedError

    def compare(self, points: Sequence[Point], held: np.ndarray) -> list[Json]:
        """Return one row per point: its settings and scores on the held-out images."""
        raise NotImplementedError

    def prepare(self, saved: Mapping[str, Any]) -> None:
        super().prepare(saved)
        self.resume(saved)

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Restore a checkpoint; {} starts anew."""
        self.sweep, self.found = saved.get("sweep", []), saved.get("found", [])
        self.training = {
            name: value.to(device()) if isinstance(value, Tensor) else value
            for name, value in saved.get("training", {}).items()
        }

    def state_dict(self) -> Json:
        return {"sweep": self.sweep, "training": self.training, "found": self.found}

    def fit(self) -> Iterator[int]:
        train, points = self.data["train"], self.points()
        if len(points) == 1:
            self.sweep = [points[0] | {"chosen": True, "diverged": False}]
        if not self.sweep:
            kept, held = self.split(train)
            yield from self.solve(kept, points)
            self.sweep, self.training, self.found = self.compare(points, held), {}, []
        before = len(points) if "l2" in points[0] else self.solver.EPOCHS  # fits, or epochs
        for step in self.solve(np.arange(len(train)), [points[self.chosen]]):
            yield before + step

    def sgd(
        self, points: Sequence[Point], dim: int, train: Callable[..., Iterator[int]]
    ) -> Iterator[int]:
        """Train by SGD on features (…, D); `train` takes points, state, solver and seed."""
        solver, seed = self.solver, self.cfg.SEED
        if not self.training:
            shape = (len(points), len(self.data["train"].classes), dim)
            self.training = start_grid(*shape, solver.INIT_STD, seed, device())
        epochs = train(points, self.training, solver, seed)
        left = solver.EPOCHS - len(self.training["losses"])
        yield from progress(epochs, f"epochs of {len(points)} classifiers", left)
        self.found = solutions_of(self.training, len(points))

    @property
    def chosen(self) -> int:
        return next(number for number, row in enumerate(self.sweep) if row["chosen"])

    def grid_details(self, held_out: float, warnings: list[str]) -> Json:
        """Return the grid and the choice, for the record."""
        for warning in warnings:
            log.warning("%s.", warning)
        losses = [loss for (loss,) in self.training["losses"]]
        return {
            "sweep": self.sweep,
            "chosen_on": f"{held_out:g} of train, held out; then trained on all of train",
            "warnings": warnings,
            "curves": {"epoch": list(range(1, len(losses) + 1)), "train_loss": losses},
        }


@task("cached", title="Classifier (linear probe)", kind="linear", longer="SOLVER.LONGER")
class Cached(GridProbe):
    """Train a linear classifier on stored features, with settings chosen within train."""

    metrics = ACCURACY

    class Keys(Section):
        class CACHED(Section):
            """The cached probe."""

            VIEWS = key(
                [CENTER, FLIP],
                """Fixed views whose features are stored. kNN stores them too, so that two probes of
                one backbone decode each image once.""",
            )
            RANDOM_CROPS = key(0, "Additional fixed random crops per image.", at_least=0)
            STANDARDIZE = key(
                True, "Scale every feature to mean 0 and variance 1 over the training features."
            )
            METHOD = key(
                "sgd", "SGD, or full-batch logistic regression (lbfgs).", choices=("sgd", "lbfgs")
            )
            LRS = key(
                [0.001, 0.01, 0.1, 1.0],
                "Learning rates of the grid of sgd.",
                distinct=True,
                above=0,
            )
            WEIGHT_DECAYS = key(
                [0.0, 0.0001, 0.001, 0.01],
                "Weight decays of the grid of sgd.",
                distinct=True,
                at_least=0,
            )
            L2 = key(
                [1e-5, 1e-4, 1e-3, 1e-2, 1e-1],
                """The grid of lbfgs, which minimizes the mean loss plus L2 / 2 times the squared
                weights.""",
                distinct=True,
                at_least=0,
            )
            LBFGS_ITERATIONS = key(1000, "Largest number of iterations of lbfgs.", at_least=1)
            HOLD_OUT = key(
                0.1,
                "Fraction of the training images that chooses the point of the grid.",
                above=0,
                below=1,
            )

    rows: Rows  # the images trained on

    @staticmethod
    def rules(cfg: CfgNode) -> Iterator[Broken]:
        views = cfg.CACHED.VIEWS
        if not set(views) <= {CENTER, FLIP} or len(set(views)) != len(views):
            yield ("CACHED.VIEWS",), f"must be some of {CENTER}, {FLIP}, each once"
        if not views and not cfg.CACHED.RANDOM_CROPS:
            yield ("CACHED.VIEWS", "CACHED.RANDOM_CROPS"), "there is no view to train on: name one"
        if Cached.name == cfg.PROBE and cfg.CACHED.METHOD == "lbfgs" and cfg.SOLVER.LONGER > 1:
            yield ("SOLVER.LONGER", "CACHED.METHOD"), "lbfgs stops where it has converged"

    @property
    def protocol_id(self) -> str:
        return "linear-cached-lbfgs" if self.cfg.CACHED.METHOD == "lbfgs" else "linear-cached"

    def train_views(self) -> list[str]:
        return stored_views(self.cfg)

    def settings(self) -> Json:
        cached, solver = self.cfg.CACHED, self.cfg.SOLVER
        views: list[Any] = [VIEW_WORDS.get(view, view) for view in cached.VIEWS]
        if cached.RANDOM_CROPS:
            views.append({"count": cached.RANDOM_CROPS, **random_crop_words(self.cfg)})
        common: Json = {
            "train_views": views,
            "standardize": cached.STANDARDIZE,
            "chosen_on": {"held_out_of_train": cached.HOLD_OUT, "stratified": True},
            "reported": "chosen point, trained again on all of train",
        }
        if cached.METHOD == "lbfgs":
            return common | {
                "optimizer": {"name": "lbfgs", "max_iterations": cached.LBFGS_ITERATIONS},
                "grid": {"l2": list(cached.L2)},
            }
        return common | {
            "head": {"layer": "linear", "weight_std": solver.INIT_STD, "bias": 0},
            "optimizer": {"name": "sgd", "momentum": solver.MOMENTUM},
            "grid": {"lr": list(cached.LRS), "weight_decay": list(cached.WEIGHT_DECAYS)},
            "batch_size": solver.BATCH_SIZE,
            "epochs": solver.EPOCHS,
            "schedule": schedule_words(self.cfg),
        }

    def points(self) -> list[Point]:
        cached = self.cfg.CACHED
        if cached.METHOD == "lbfgs":
            # From strong to weak: each solution is a good start for the next.
            return [{"l2": l2} for l2 in sorted(cached.L2, reverse=True)]
        pairs = itertools.product(cached.LRS, cached.WEIGHT_DECAYS)
        return [{"lr": lr, "weight_decay": decay} for lr, decay in pairs]

    def split(self, train: LabeledImages) -> tuple[np.ndarray, np.ndarray]:
        kept, held = hold_out(train.labels, self.cfg.CACHED.HOLD_OUT, self.cfg.SEED)
        if not len(held):
            raise KsclError(
                "With one train image per class, none can be held out to choose a grid point. "
                "Use more images, or one point (CACHED.LRS, CACHED.WEIGHT_DECAYS, CACHED.L2)."
            )
        return kept, held

    def solve(self, images: np.ndarray, points: Sequence[Point]) -> Iterator[int]:
        cached, train, features = self.cfg.CACHED, self.data["train"], self.features["train"]
        indices = np.stack([slot(v) * features.count + images for v in cached_views(self.cfg)])
        self.rows = Rows(features.rows, indices, train.targets[torch.from_numpy(images)])
        if cached.STANDARDIZE:
            self.rows = standardized(self.rows)
        if cached.METHOD == "sgd":
            yield from self.sgd(points, features.rows.shape[1], partial(train_grid, self.rows))
            return
        self.training.setdefault("losses", [[]])
        for point in points[len(self.found) :]:
            start = self.found[-1] if self.found else None
            settings = (point["l2"], cached.LBFGS_ITERATIONS, device(), start)
            weight, bias, reached = fit_logistic(self.rows, len(train.classes), *settings)
            self.found.append((weight, bias))
            self.training["losses"][0].append(reached)
            yield len(self.found)

    def test_rows(self, role: str, images: np.ndarray) -> Rows:
        """Return center crops, standardized like the rows trained on."""
        rows = Rows.of(self.centers(role), self.data[role].targets).part(images)
        return replace(rows, center=self.rows.center, scale=self.rows.scale)

    def compare(self, points: Sequence[Point], held: np.ndarray) -> list[Json]:
        sweep: list[Json] = []
        test = self.test_rows("train", held)
        hits: list[Tensor] = []  # (n,) per point: which held-out images are classified correctly
        solved = zip(points, self.found, self.training["losses"][-1], strict=True)
        for point, solution, train_loss in solved:
            outputs = outputs_of(test, *solution)
            loss = float(F.cross_entropy(outputs, test.labels))
            hits.append(outputs.argmax(1) == test.labels)
            top1 = 100 * int(hits[-1].sum()) / len(test)
            figures = {"held_out_top1": top1, "held_out_loss": loss, "train_loss": train_loss}
            sweep.append(sweep_row(point, figures))
        best = choose(sweep, better, "CACHED.LRS")
        sweep[best] |= {"chosen": True, "clear_edges": _clear_edges(points, hits, best)}
        how_many = (len(points), len(test))
        log.info("%s: the best of %d on %d held-out images.", in_words(points[best]), *how_many)
        return sweep

    def edge_warnings(self) -> list[str]:
        """Return which list to extend, and how, for every clear edge of the chosen point."""
        found, row = [], self.sweep[self.chosen]
        for name in row.get("clear_edges", []):
            values = sorted(self.cfg.CACHED[KEYS[name]])
            side = "smaller" if row[name] == values[0] else "larger"
            grid = f"CACHED.{KEYS[name]} [{', '.join(f'{v:g}' for v in values)}]"
            found.append(f"{name} {row[name]:g} is at the edge of {grid}: add a {side} value")
        return found

    def outcomes(self) -> list[Outcome]:
        cached, val, (solution,) = self.cfg.CACHED, self.data["val"], self.found
        chosen = self.points()[self.chosen]
        outputs = outputs_of(self.test_rows("val", np.arange(len(val))), *solution)
        details = self.grid_details(cached.HOLD_OUT, self.edge_warnings()) | {
            "chosen": chosen,
            "val_loss": float(F.cross_entropy(outputs, val.targets)),
        }
        if cached.METHOD == "sgd":
            details["epochs"] = self.solver.EPOCHS
        result = score(ranked_classes(outputs), val.targets, val.classes)
        remark = f"{in_words(chosen)}, chosen of {len(self.sweep)} within train"
        return [Outcome(result, details, remark, on_raw_features(*solution, self.rows))]


def stored_views(cfg: CfgNode) -> list[str]:
    """Return the views to train on, and the center crop, on which points are compared."""
    return list(dict.fromkeys([CENTER, *cached_views(cfg)]))


def cached_views(cfg: CfgNode) -> list[str]:
    """Return the views that the cached probe trains on."""
    return [*cfg.CACHED.VIEWS, *(f"{FIXED_CROP}{turn}" for turn in range(cfg.CACHED.RANDOM_CROPS))]


def in_words(point: Point) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in point.items())


def sweep_row(point: Point, figures: Json) -> Json:
    """Return a point's row of the sweep, without figures if one is not finite."""
    diverged = not all(map(math.isfinite, figures.values()))
    shown = dict.fromkeys(figures) if diverged else figures
    return {**point, **shown, "diverged": diverged, "chosen": False}


def choose(sweep: Sequence[Json], merit: Callable[[Json], Any], lrs: str) -> int:
    """Return the first of the best rows; `lrs` is the key of the learning rates."""
    usable = [number for number, row in enumerate(sweep) if not row["diverged"]]
    if not usable:
        raise KsclError(f"Every point of the grid diverged. Lower {lrs}.")
    return max(usable, key=lambda number: merit(sweep[number]))


def better(row: Json) -> tuple[float, float]:
    """Rank a row by held-out top-1; ties go to the lowest loss."""
    return row["held_out_top1"], -row["held_out_loss"]


def _clear_edges(points: Sequence[Point], hits: Sequence[Tensor], best: int) -> list[str]:
    """Return the settings of the best point that are clearly better at the edge of their range."""
    found = []
    for name, value in points[best].items():
        values = sorted({point[name] for point in points})
        beside = beside_end(values.index(value), len(values))
        if beside is None or value == 0:  # there is nothing below 0
            continue
        neighbor = points.index(points[best] | {name: values[beside]})
        if beyond_noise(hits[best].double().numpy() - hits[neighbor].double().numpy()):
            found.append(name)
    return found
