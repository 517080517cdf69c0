"""The cached probe: a grid of linear classifiers on stored features, its point chosen within train.

1. A fraction of train is held out, class by class.
2. All points of the grid are trained on the rest, together.
3. The point that is best on the held-out images is trained again on all of train.
4. Val is used once, at the end.

If the best point is at the end of a range, and better than its neighbor inside the range by more
than the noise of the held-out images, a warning says so: a value beyond may be better still.

There are two solvers. SGD trains all points on the same batches, as one matrix product: the weights
of P points, C classes each, are stacked into one matrix (P·C, D), so that a step costs two matrix
products whatever P is. Each point is updated as torch.optim.SGD would update it alone:
v ← m v + (∇ + wd w), w ← w − lr v. The batch is the last axis of all activations: a softmax over
ten classes is ten times slower if the classes are the last axis.

L-BFGS is multinomial logistic regression on the full batch: no learning rate, no epochs, no chance.
It minimizes  mean cross-entropy + L2/2 · ‖W‖²  (the bias is not penalized), which is scikit-learn's
LogisticRegression at C = 1 / (L2 · rows).
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor

from kscl.config import Broken, Section, key
from kscl.engine.schedule import cosine_factor, step_factor
from kscl.errors import KsclError
from kscl.records.record import Metric, Protocol
from kscl.rng import Stream, permutation, random_words
from kscl.run.task import task
from kscl.runtime.distributed import device
from kscl.runtime.logs import LOGGER, SECONDS_BETWEEN_LINES
from linear_eval.config import CENTER, FLIP
from linear_eval.features import Features
from linear_eval.images import FIXED_CROP, hold_out, slot
from linear_eval.probe import VIEW_WORDS, Json, Probe, random_crop_words, schedule_words
from linear_eval.score import Classifier, Outcome, beyond_noise, ranked_classes, score

log = logging.getLogger(LOGGER)

GRID, REFIT = "grid", "refit"
KEYS = {"lr": "CACHED.LRS", "weight_decay": "CACHED.WEIGHT_DECAYS", "l2": "CACHED.L2"}
CHUNK = 65536  # rows of features per pass where there is no batch
IN_MEMORY = 2**31  # bytes of features that L-BFGS gathers once
HISTORY = 10
# The end: no entry of the gradient, or no step of the loss, is larger. float32 resolves no less.
GRADIENT_TOLERANCE = 1e-6
LOSS_TOLERANCE = 1e-10

Chunk = tuple[Tensor, Tensor]  # features (n, D), labels (n,)


class Point(NamedTuple):
    """One setting of the grid."""

    lr: float
    weight_decay: float


@dataclass(frozen=True)
class Rows:
    """The features to train on: chosen images of a set, in one or more views, standardized."""

    table: Tensor  # (any, D), float32, perhaps mapped from disk
    indices: np.ndarray  # (V, n): row of the table with view v of image i
    labels: Tensor  # (n,) int64
    center: Tensor | None = None  # (D,), subtracted
    scale: Tensor | None = None  # (D,), multiplied

    def __len__(self) -> int:
        return self.indices.shape[1]

    def take(self, indices: Tensor) -> Tensor:
        """Return features (b, D) from rows of the table."""
        features = self.table.index_select(0, indices)
        if self.center is None or self.scale is None:
            return features
        return features.sub_(self.center).mul_(self.scale)

    def near(self, device: torch.device) -> Rows:
        """Return the same rows in the memory of a GPU if they fit, so that no step waits for them.

        They take at most half of what is free: a step needs memory too.
        """
        dim = self.table.shape[1]
        needed = 4 * self.indices.size * dim
        if device.type == "cpu" or needed > torch.cuda.mem_get_info(device)[0] / 2:
            return self
        table = torch.empty(self.indices.size, dim, device=device)
        indices = torch.from_numpy(self.indices.reshape(-1))
        for part, into in zip(indices.split(CHUNK), table.split(CHUNK), strict=True):
            into.copy_(self.take(part))  # standardized by now
        order = np.arange(self.indices.size).reshape(self.indices.shape)
        return Rows(table, order, self.labels)


@dataclass
class GridState:
    """The state of P classifiers between two epochs."""

    weight: Tensor  # (P·C, D)
    bias: Tensor  # (P·C, 1)
    weight_velocity: Tensor
    bias_velocity: Tensor
    losses: list[list[float]] = field(default_factory=list)  # mean loss of each epoch, by point

    def to(self, device: torch.device) -> GridState:
        """Return the state on another device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if name != "losses"}
        return GridState(**moved, losses=self.losses)

    def classifiers(self, points: int) -> tuple[Tensor, Tensor]:
        """Return the weights (P, C, D) and biases (P, C)."""
        return self.weight.view(points, -1, self.weight.shape[1]), self.bias.view(points, -1)


@dataclass(frozen=True)
class Fitted:
    """A trained point: a classifier on the (standardized) rows, and its training loss per epoch."""

    weight: Tensor  # (C, D)
    bias: Tensor  # (C,)
    losses: list[float]


@task("cached", title="Classifier (linear probe)", kind="linear")
class Cached(Probe):
    """Train a linear classifier on stored features, with settings chosen within train."""

    metrics = (
        Metric("top1", "top-1", headline=True, per_image=True),
        Metric("top5", "top-5", per_image=True),
    )

    class Keys(Section):
        class CACHED(Section):
            """The cached probe."""

            VIEWS = key(
                [CENTER, FLIP],
                """Fixed views whose features are stored. Other probes on stored features store all
                of them too, in one pass, so that no image is decoded twice for two probes of one
                backbone.""",
            )
            RANDOM_CROPS = key(0, "Number of fixed random crops per image in addition.", at_least=0)
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

    stage: str  # GRID or REFIT, which `training` and `found` are of
    sweep: list[Json]  # of the grid, once it is done
    training: GridState | None  # of SGD
    found: list[Fitted]  # of L-BFGS

    @staticmethod
    def rules(cfg: CfgNode) -> Iterator[Broken]:
        """Check the views; other probes store them too."""
        views = cfg.CACHED.VIEWS
        if not set(views) <= {CENTER, FLIP} or len(set(views)) != len(views):
            yield ("CACHED.VIEWS",), f"must be some of {CENTER}, {FLIP}, each once"
        if not views and not cfg.CACHED.RANDOM_CROPS:
            yield ("CACHED.VIEWS", "CACHED.RANDOM_CROPS"), "no view to train on is left: name one"

    def settings(self) -> Json:
        """Return grid, solver and choice."""
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

    def protocol(self, sizes: Mapping[str, int]) -> Protocol:
        """Return a protocol per solver."""
        lbfgs = self.cfg.CACHED.METHOD == "lbfgs"
        return Protocol("linear-cached-lbfgs" if lbfgs else "linear-cached", self.definition())

    def train_views(self) -> list[str]:
        """Return the views to train on, and the center crops that points are compared on."""
        return stored_views(self.cfg)

    def prepare(self, saved: Mapping[str, Any]) -> None:
        """Take up what was saved."""
        super().prepare(saved)
        self.resume(saved)

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Start, or go on from a checkpoint."""
        self.stage, self.sweep = saved.get("stage", GRID), saved.get("sweep", [])
        self.found = [Fitted(**fitted) for fitted in saved.get("found", [])]
        training = saved.get("training")
        self.training = GridState(**training).to(device()) if training else None

    def state_dict(self) -> Json:
        """Return the stage and how far its solver is."""
        return {
            "stage": self.stage,
            "sweep": self.sweep,
            "training": dict(vars(self.training)) if self.training else None,
            "found": [vars(fitted) for fitted in self.found],
        }

    def fit(self) -> Iterator[int]:
        """Train the grid on a part of train, then the best point on all of it."""
        cfg, train, features = self.cfg, self.data["train"], self.features["train"]
        points = grid_points(cfg)
        if self.stage == GRID and len(points) > 1:
            kept, held = hold_out(train.labels, cfg.CACHED.HOLD_OUT, cfg.SEED)
            if not len(held):
                raise KsclError(
                    "One train image per class leaves none to choose a point of the grid on. Use "
                    "more images, or a grid of one point (CACHED.LRS, CACHED.WEIGHT_DECAYS, "
                    "CACHED.L2)."
                )
            rows = training_rows(cfg, features, train.labels, kept)
            yield from self.solve(rows, points, 0)
            test = rows_like(rows, features, train.labels, held)
            self.sweep = compare(cfg, points, self.found, test)
        elif self.stage == GRID:
            self.sweep = [_in_names(cfg, points[0]) | {"chosen": True, "diverged": False}]
        if self.stage == GRID:
            self.stage, self.training, self.found = REFIT, None, []
        self.rows = training_rows(cfg, features, train.labels, np.arange(len(train)))
        lbfgs = cfg.CACHED.METHOD == "lbfgs"
        done = len(cfg.CACHED.L2) if lbfgs else cfg.SOLVER.EPOCHS  # steps
        yield from self.solve(self.rows, [points[choose(self.sweep)]], done)

    def solve(self, rows: Rows, points: Sequence[Point], steps_before: int) -> Iterator[int]:
        """Train points on rows, into `self.found`, from where a checkpoint is."""
        steps = self._lbfgs if self.cfg.CACHED.METHOD == "lbfgs" else self._sgd
        for step in steps(rows, points):
            yield steps_before + step

    def _sgd(self, rows: Rows, points: Sequence[Point]) -> Iterator[int]:
        cfg, classes = self.cfg, len(self.data["train"].classes)
        if self.training is None:
            start = (cfg.SOLVER.INIT_STD, cfg.SEED, device())
            self.training = start_training(len(points), classes, rows.table.shape[1], *start)
        last_line = time.monotonic()
        for epoch in train_points(rows, points, self.training, cfg.SOLVER, cfg.SEED):
            if time.monotonic() - last_line > SECONDS_BETWEEN_LINES:
                last_line = time.monotonic()
                log.info("%s: Epoch %d of %d.", self.stage, epoch, cfg.SOLVER.EPOCHS)
            yield epoch
        parts = (*self.training.classifiers(len(points)), zip(*self.training.losses, strict=True))
        self.found = [Fitted(w, b, list(losses)) for w, b, losses in zip(*parts, strict=True)]

    def _lbfgs(self, rows: Rows, points: Sequence[Point]) -> Iterator[int]:
        classes, most = len(self.data["train"].classes), self.cfg.CACHED.LBFGS_ITERATIONS
        for point in points[len(self.found) :]:
            start = (self.found[-1].weight, self.found[-1].bias) if self.found else None
            fitted = fit_logistic(rows, classes, point.weight_decay, most, device(), start)
            weight, bias, reached = fitted
            self.found.append(Fitted(weight, bias, [reached]))
            yield len(self.found)

    def outcomes(self) -> list[Outcome]:
        """Score the chosen point on val."""
        cfg, val, (fitted,) = self.cfg, self.data["val"], self.found
        points = grid_points(cfg)
        chosen = points[choose(self.sweep)]
        at_edge = edge_warnings(cfg, self.sweep)
        for words in at_edge:
            log.warning("%s.", words)
        test = rows_like(self.rows, self.features["val"], val.labels, np.arange(len(val)))
        outputs = outputs_of(test, fitted.weight, fitted.bias)
        epochs = list(range(1, len(fitted.losses) + 1))
        details: Json = {
            "sweep": self.sweep,
            "chosen": _in_names(cfg, chosen),
            "chosen_on": f"{cfg.CACHED.HOLD_OUT:g} of train, held out; "
            "then trained on all of train",
            "warnings": at_edge,
            "val_loss": float(F.cross_entropy(outputs, val.targets)),
            "curves": {"epoch": epochs, "train_loss": fitted.losses},
        }
        if cfg.CACHED.METHOD == "sgd":
            details["epochs"] = cfg.SOLVER.EPOCHS
        result = score(ranked_classes(outputs), val.targets, val.classes)
        remark = f"{_in_words(cfg, chosen)}, chosen of {len(points)} within train"
        return [Outcome(result, details, remark, _on_raw_features(fitted, self.rows))]


def stored_views(cfg: CfgNode) -> list[str]:
    """Return the center crop and all views that the cached probe trains on."""
    return list(dict.fromkeys([CENTER, *cached_views(cfg)]))


def cached_views(cfg: CfgNode) -> list[str]:
    """Return the names of the fixed views that the cached probe trains on."""
    return [*cfg.CACHED.VIEWS, *(f"{FIXED_CROP}{turn}" for turn in range(cfg.CACHED.RANDOM_CROPS))]


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
        raise KsclError("Every point of the grid diverged. Lower CACHED.LRS.")
    return max(usable, key=lambda n: (sweep[n]["held_out_top1"], -sweep[n]["held_out_loss"], -n))


def training_rows(cfg: CfgNode, features: Features, labels: np.ndarray, images: np.ndarray) -> Rows:
    """Return the chosen images in all views, standardized by themselves if the config says so."""
    indices = np.stack([slot(view) * features.count + images for view in cached_views(cfg)])
    rows = Rows(features.rows, indices, torch.from_numpy(labels[images]))
    return standardized(rows) if cfg.CACHED.STANDARDIZE else rows


def rows_like(rows: Rows, features: Features, labels: np.ndarray, images: np.ndarray) -> Rows:
    """Return center crops of images to test on, standardized as the training rows were."""
    indices = (slot(CENTER) * features.count + images)[None]
    targets = torch.from_numpy(labels[images])
    return replace(rows, table=features.rows, indices=indices, labels=targets)


def compare(
    cfg: CfgNode, points: Sequence[Point], found: Sequence[Fitted], test: Rows
) -> list[Json]:
    """Return one row per point: its settings and its scores on the held-out part of train."""
    sweep: list[Json] = []
    hits: list[Tensor] = []  # (n,) of each point: which held-out images it classifies rightly
    for point, fitted in zip(points, found, strict=True):
        outputs = outputs_of(test, fitted.weight, fitted.bias)
        loss = float(F.cross_entropy(outputs, test.labels))
        diverged = not (math.isfinite(loss) and math.isfinite(fitted.losses[-1]))
        hits.append(outputs.argmax(1) == test.labels)
        sweep.append(
            _in_names(cfg, point)
            | {
                "held_out_top1": None if diverged else 100 * int(hits[-1].sum()) / len(test),
                "held_out_loss": None if diverged else loss,
                "train_loss": None if diverged else fitted.losses[-1],
                "diverged": diverged,
                "chosen": False,
            }
        )
    best = choose(sweep)
    sweep[best] |= {"chosen": True, "clear_edges": _clear_edges(cfg, points, hits, best)}
    words = _in_words(cfg, points[best])
    log.info("%s: The best of %d on %d held-out train images.", words, len(points), len(test))
    return sweep


def _in_names(cfg: CfgNode, point: Point) -> Json:
    return {"l2": point.weight_decay} if cfg.CACHED.METHOD == "lbfgs" else point._asdict()


def _in_words(cfg: CfgNode, point: Point) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in _in_names(cfg, point).items())


def _clear_edges(
    cfg: CfgNode, points: Sequence[Point], hits: Sequence[Tensor], best: int
) -> list[str]:
    """Return the settings of the best point that end their range and are clearly better there."""
    named = [_in_names(cfg, point) for point in points]
    found = []
    for name, value in named[best].items():
        values = sorted({point[name] for point in named})
        if len(values) < 3 or value not in (values[0], values[-1]) or value == 0:
            continue  # nothing lies beyond 0
        inside = values[1] if value == values[0] else values[-2]
        neighbor = named.index(named[best] | {name: inside})
        if beyond_noise(hits[best].double().numpy() - hits[neighbor].double().numpy()):
            found.append(name)
    return found


def edge_warnings(cfg: CfgNode, sweep: Sequence[Json]) -> list[str]:
    """Say which key's list to extend, and where, for every clear edge of the chosen point."""
    (chosen,) = (row for row in sweep if row["chosen"])
    found = []
    for name in chosen.get("clear_edges", []):
        key, value = KEYS[name], chosen[name]
        values = sorted(cfg.CACHED[key.removeprefix("CACHED.")])
        side = "smaller" if value == values[0] else "larger"
        listed = ", ".join(f"{v:g}" for v in values)
        found.append(f"{name} {value:g} at the edge of {key} [{listed}]: add a {side} value")
    return found


def _on_raw_features(fitted: Fitted, rows: Rows) -> Classifier:
    """Return the same classifier on features as the backbone gives them: W (x − m) s + b."""
    weight, bias = fitted.weight.double().cpu(), fitted.bias.double().cpu()
    if rows.center is not None and rows.scale is not None:
        weight = weight * rows.scale
        bias = bias - weight @ rows.center.double()
    return Classifier(weight.float(), bias.float())


# SGD


def start_training(
    points: int, classes: int, dim: int, init_std: float, seed: int, device: torch.device
) -> GridState:
    """Return the start of all points, from the same weights."""
    weight, bias = new_head(classes, dim, init_std, seed)
    weight, bias = weight.repeat(points, 1).to(device), bias.repeat(points)[:, None].to(device)
    return GridState(weight, bias, torch.zeros_like(weight), torch.zeros_like(bias))


def new_head(classes: int, features: int, std: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return a weight (C, D) from N(0, std²) and a bias (C,) of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.empty(classes, features).normal_(0, std, generator=generator)
    return weight, torch.zeros(classes)


def rate_factor(solver: CfgNode, epoch: int) -> float:
    """Return what the learning rate is multiplied by in an epoch."""
    if solver.SCHEDULE == "cosine":
        return cosine_factor(epoch / solver.EPOCHS)
    return step_factor(epoch, list(solver.MILESTONES), solver.GAMMA)


@torch.no_grad()
def train_points(
    rows: Rows,
    points: Sequence[Point],
    training: GridState,
    solver: CfgNode,
    seed: int,
) -> Iterator[int]:
    """Train from the epoch that the state is in to the end; yield the number of each epoch."""
    classes = len(training.weight) // len(points)
    device = training.weight.device
    learning_rates, decays = (
        torch.tensor(values, device=device).repeat_interleave(classes)[:, None]
        for values in zip(*points, strict=True)
    )  # (P·C, 1) each
    decays_at_all = bool(decays.any())
    rows = rows.near(device)
    for epoch in range(len(training.losses), solver.EPOCHS):
        epoch_rates = learning_rates * rate_factor(solver, epoch)
        loss = torch.zeros(len(points), device=device)
        for indices, labels in epoch_batches(rows, solver.BATCH_SIZE, seed, epoch, device):
            features = rows.take(indices).to(device)  # (B, D)
            outputs = torch.addmm(training.bias, training.weight, features.T)  # (P·C, B)
            log_p = outputs.view(len(points), classes, -1).log_softmax(1)  # (P, C, B)
            own = labels.expand(len(points), 1, -1)  # (P, 1, B)
            loss -= log_p.gather(1, own).sum((1, 2))
            gradient = log_p.exp_().scatter_add_(1, own, _minus_one(own)).flatten(0, 1)  # (P·C, B)
            momentum, scale = solver.MOMENTUM, 1 / len(features)
            training.weight_velocity.addmm_(gradient, features, beta=momentum, alpha=scale)
            training.bias_velocity.mul_(momentum).add_(gradient.sum(1, keepdim=True), alpha=scale)
            if decays_at_all:
                training.weight_velocity.addcmul_(training.weight, decays)
                training.bias_velocity.addcmul_(training.bias, decays)
            training.weight.addcmul_(training.weight_velocity, epoch_rates, value=-1)
            training.bias.addcmul_(training.bias_velocity, epoch_rates, value=-1)
        training.losses.append((loss / len(rows)).tolist())
        yield len(training.losses)


def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return the order in which an epoch visits `count` images."""
    return permutation(seed, epoch, Stream.ORDER, count)


def views_of_epoch(seed: int, epoch: int, count: int, num_views: int) -> np.ndarray:
    """Return which of its fixed views each of `count` images shows in this epoch."""
    words = random_words(seed, epoch, Stream.VIEW_OF_EPOCH, 0, count)
    return (words % np.uint64(num_views)).astype(np.int64)


def epoch_batches(
    rows: Rows, batch_size: int, seed: int, epoch: int, device: torch.device
) -> Iterable[tuple[Tensor, Tensor]]:
    """Return (rows of the table, labels) of each batch of an epoch; the last may be smaller.

    The rows' numbers are where the table is, the labels on the device, copied once per epoch.
    """
    count = len(rows)
    order = epoch_order(seed, epoch, count)
    views = views_of_epoch(seed, epoch, count, len(rows.indices))
    indices = torch.from_numpy(rows.indices[views[order], order]).to(rows.table.device)
    labels = rows.labels[torch.from_numpy(order)].to(device)
    return zip(indices.split(batch_size), labels.split(batch_size), strict=True)


def _minus_one(like: Tensor) -> Tensor:
    return torch.full(like.shape, -1.0, device=like.device)


@torch.no_grad()
def outputs_of(rows: Rows, weight: Tensor, bias: Tensor) -> Tensor:
    """Return logits (n, C) of a classifier (C, D), (C,) on the first view of every image."""
    indices = torch.from_numpy(rows.indices[0])
    parts = [
        torch.addmm(bias, rows.take(part).to(weight.device), weight.T)
        for part in indices.split(CHUNK)
    ]
    return torch.cat(parts).cpu()


@torch.no_grad()
def standardized(rows: Rows) -> Rows:
    """Return the rows with every feature at mean 0 and variance 1; constant features are 0."""
    total = torch.zeros(rows.table.shape[1], dtype=torch.float64)
    squares = torch.zeros_like(total)
    for part in torch.from_numpy(rows.indices.reshape(-1)).split(CHUNK):
        features = rows.table.index_select(0, part).double()
        total += features.sum(0)
        squares += features.square_().sum(0)
    mean = total / rows.indices.size
    variance = squares / rows.indices.size - mean.square()
    # Below this a feature is constant except for rounding, which scaling would amplify.
    alive = variance > 1e-10 * (squares / rows.indices.size)
    scale = torch.where(alive, variance.clamp_min(1e-38).rsqrt(), 0.0)
    return Rows(rows.table, rows.indices, rows.labels, mean.float(), scale.float())


# L-BFGS


def fit_logistic(
    rows: Rows,
    classes: int,
    l2: float,
    max_iterations: int,
    device: torch.device,
    start: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, float]:
    """Return weight (C, D), bias (C,) and the objective reached, over all views of the rows."""
    dim = rows.table.shape[1]
    # Every step needs all rows, so those that fit into memory are gathered once.
    small = rows.indices.size * dim * 4 <= IN_MEMORY
    gathered = list(chunks_of(rows, device)) if small else []

    def value_and_gradients(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return objective(gathered or chunks_of(rows, device), weight, bias, l2)

    start = start or (torch.zeros(classes, dim), torch.zeros(classes))
    return _minimize(value_and_gradients, start, max_iterations, device)


def fit_binary(
    features: Tensor,
    labels: np.ndarray,
    weight_decay: float,
    max_iterations: int,
    device: torch.device,
    start: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return weight (C, D) and bias (C,) of one two-class regression per column of labels (n, C).

    Label 1 is a class that is there, 0 one that is not, and -1 takes no part. Each class minimizes
    its summed loss + weight_decay/2 · ‖w‖², scikit-learn's objective at C = 1 / weight_decay, here
    divided by the number of images; as the classes share nothing, their sum has the same minimum.
    """
    features, known = features.to(device), torch.from_numpy(labels.T).to(device)
    truth, counted = (known == 1).float(), (known >= 0).float()  # (C, n)
    classes, count = truth.shape

    def value_and_gradients(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs = torch.addmm(bias[:, None], weight, features.T)  # (C, n)
        loss = (F.softplus(outputs) - truth * outputs).mul(counted).sum(dtype=torch.float64)
        gradient = (outputs.sigmoid() - truth) * counted
        loss = loss + 0.5 * weight_decay * weight.square().sum(dtype=torch.float64)
        weight_grad = gradient @ features + weight_decay * weight
        return loss / count, weight_grad / count, gradient.sum(1) / count

    start = start or (torch.zeros(classes, features.shape[1]), torch.zeros(classes))
    return _minimize(value_and_gradients, start, max_iterations, device)[:2]


@torch.no_grad()
def _minimize(
    value_and_gradients: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    start: tuple[Tensor, Tensor],
    max_iterations: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, float]:
    """Return the weight and bias at the minimum, and the objective there."""
    weight, bias = (tensor.clone().to(device) for tensor in start)
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=max_iterations,
        history_size=HISTORY,
        tolerance_grad=GRADIENT_TOLERANCE,
        tolerance_change=LOSS_TOLERANCE,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        loss, weight.grad, bias.grad = value_and_gradients(weight, bias)
        return loss

    optimizer.step(closure)
    return weight, bias, float(value_and_gradients(weight, bias)[0])


def chunks_of(rows: Rows, device: torch.device) -> Iterator[Chunk]:
    """Yield features and labels of all views, on the device."""
    for view in torch.from_numpy(rows.indices):
        for indices, labels in zip(view.split(CHUNK), rows.labels.split(CHUNK), strict=True):
            yield rows.take(indices).to(device), labels.to(device)


@torch.no_grad()
def objective(
    chunks: Iterable[Chunk], weight: Tensor, bias: Tensor, l2: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss (float64) and its gradients by weight and bias."""
    loss = torch.zeros((), device=weight.device, dtype=torch.float64)
    weight_grad, bias_grad, count = torch.zeros_like(weight), torch.zeros_like(bias), 0
    for features, labels in chunks:
        log_p = torch.addmm(bias[:, None], weight, features.T).log_softmax(0)  # (C, n)
        own = labels[None]  # (1, n)
        loss -= log_p.gather(0, own).sum()
        gradient = log_p.exp_().scatter_add_(0, own, torch.full_like(log_p[:1], -1.0))
        weight_grad.addmm_(gradient, features)
        bias_grad += gradient.sum(1)
        count += len(labels)
    penalty = 0.5 * l2 * weight.square().sum(dtype=torch.float64)
    return loss / count + penalty, weight_grad / count + l2 * weight, bias_grad / count
