"""Many linear classifiers trained together on the same batches, as one matrix product.

The weights of P points of a grid, C classes each, are stacked into one matrix (P·C, D), so that a
step costs two matrix products whatever P is. Each point is updated as torch.optim.SGD would update
it alone: v ← m v + (∇ + wd w), w ← w − lr v.

The batch is the last axis of all activations: a softmax over ten classes is ten times slower if
the classes are the last axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from kscl.engine.schedule import cosine_factor, step_factor
from linear_eval.splits import epoch_order, new_head, views_of_epoch

CHUNK = 65536  # rows of features per pass where there is no batch


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

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return dict(vars(self))

    def to(self, device: torch.device) -> GridState:
        """Return the state on another device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if name != "losses"}
        return GridState(**moved, losses=self.losses)

    def classifiers(self, points: int) -> tuple[Tensor, Tensor]:
        """Return the weights (P, C, D) and biases (P, C)."""
        return self.weight.view(points, -1, self.weight.shape[1]), self.bias.view(points, -1)


def start_training(
    points: int, classes: int, dim: int, init_std: float, seed: int, device: torch.device
) -> GridState:
    """Return the start of all points, from the same weights."""
    weight, bias = new_head(classes, dim, init_std, seed)
    weight, bias = weight.repeat(points, 1).to(device), bias.repeat(points)[:, None].to(device)
    return GridState(weight, bias, torch.zeros_like(weight), torch.zeros_like(bias))


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
    after_epoch: Callable[[GridState], None] = lambda training: None,
) -> GridState:
    """Train from the epoch that the state is in to the end."""
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
        after_epoch(training)
    return training


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
