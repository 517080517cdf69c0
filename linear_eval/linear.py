"""Linear classifiers on stored features: SGD on a whole grid of settings at once, and L-BFGS.

SGD trains P points of a grid on the same batches. The weights of their C classes are stacked into
one matrix (P·C, D), so a step costs two matrix products for any P. Each point is updated as by
torch.optim.SGD: v ← m v + (∇ + wd w), w ← w − lr v. The batch is the last axis of all activations:
softmax over ten classes is ten times slower along the last axis.

L-BFGS is full-batch logistic regression, without learning rate or randomness. It minimizes
mean cross-entropy + L2/2 · ‖W‖²  (the bias is not penalized): scikit-learn's LogisticRegression at
C = 1 / (L2 · rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor

from kscl.engine.schedule import cosine_factor, step_factor
from kscl.rng import Stream, permutation, random_words

CHUNK = 65536  # rows of features processed at once outside of SGD
IN_MEMORY = 2**31  # bytes of features that L-BFGS keeps in memory
HISTORY = 10
# L-BFGS stops when the largest gradient entry or the change of the loss is below these.
GRADIENT_TOLERANCE = 1e-6
LOSS_TOLERANCE = 1e-10

Point = dict[str, float]  # the settings at one point of a grid
Solution = tuple[Tensor, Tensor]  # weight (C, D), bias (C,)
Chunk = tuple[Tensor, Tensor]  # features (n, D), labels (n, …)


@dataclass(frozen=True)
class Rows:
    """The features of chosen images in one or more views, standardized if `center` is set."""

    table: Tensor  # (any, D), float32, perhaps memory-mapped
    indices: np.ndarray  # (V, n): row of the table with view v of image i
    labels: Tensor  # (n,) int64; (n, C) of images with several classes
    center: Tensor | None = None  # (D,), subtracted
    scale: Tensor | None = None  # (D,), multiplied

    @classmethod
    def of(cls, table: Tensor, labels: Tensor) -> Rows:
        """Return all rows of a table, as one view."""
        return cls(table, np.arange(len(table))[None], labels)

    def part(self, images: np.ndarray) -> Rows:
        """Return the rows of some of the images."""
        labels = self.labels[torch.from_numpy(images)]
        return replace(self, indices=self.indices[:, images], labels=labels)

    def __len__(self) -> int:
        return self.indices.shape[1]

    def take(self, indices: Tensor) -> Tensor:
        """Return features (b, D) from rows of the table."""
        features = self.table.index_select(0, indices)
        if self.center is None or self.scale is None:
            return features
        return features.sub_(self.center).mul_(self.scale)

    def near(self, device: torch.device) -> Rows:
        """Return the rows in GPU memory if they take at most half of what is free."""
        dim = self.table.shape[1]
        needed = 4 * self.indices.size * dim
        if device.type == "cpu" or needed > torch.cuda.mem_get_info(device)[0] / 2:
            return self
        table = torch.empty(self.indices.size, dim, device=device)
        indices = torch.from_numpy(self.indices.reshape(-1))
        for part, into in zip(indices.split(CHUNK), table.split(CHUNK), strict=True):
            into.copy_(self.take(part))  # standardized
        order = np.arange(self.indices.size).reshape(self.indices.shape)
        return Rows(table, order, self.labels)


@torch.no_grad()
def standardized(rows: Rows) -> Rows:
    """Scale every feature to mean 0 and variance 1; constant features become 0."""
    total = torch.zeros(rows.table.shape[1], dtype=torch.float64)
    squares = torch.zeros_like(total)
    for part in torch.from_numpy(rows.indices.reshape(-1)).split(CHUNK):
        features = rows.table.index_select(0, part).double()
        total += features.sum(0)
        squares += features.square_().sum(0)
    mean = total / rows.indices.size
    variance = squares / rows.indices.size - mean.square()
    # A smaller variance is rounding noise of a constant, which scaling would amplify.
    alive = variance > 1e-10 * (squares / rows.indices.size)
    scale = torch.where(alive, variance.clamp_min(1e-38).rsqrt(), 0.0)
    return replace(rows, center=mean.float(), scale=scale.float())


@torch.no_grad()
def outputs_of(rows: Rows, weight: Tensor, bias: Tensor) -> Tensor:
    """Return logits (n, C) of a classifier (C, D), (C,) on the first view of every image."""
    parts = [
        torch.addmm(bias, rows.take(part).to(weight.device), weight.T)
        for part in torch.from_numpy(rows.indices[0]).split(CHUNK)
    ]
    return torch.cat(parts).cpu()


def on_raw_features(weight: Tensor, bias: Tensor, rows: Rows) -> Solution:
    """Return the same classifier for features that are not standardized: W (x − m) s + b."""
    weight, bias = weight.double().cpu(), bias.double().cpu()
    if rows.center is not None and rows.scale is not None:
        weight = weight * rows.scale
        bias = bias - weight @ rows.center.double()
    return weight.float(), bias.float()


def new_head(classes: int, features: int, std: float, seed: int) -> Solution:
    """Return a weight (C, D) from N(0, std²) and a bias (C,) of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.empty(classes, features).normal_(0, std, generator=generator)
    return weight, torch.zeros(classes)


# SGD


def rate_factor(solver: CfgNode, epoch: int) -> float:
    """Return the factor of the learning rate in an epoch."""
    if solver.SCHEDULE == "cosine":
        return cosine_factor(epoch / solver.EPOCHS)
    return step_factor(epoch, list(solver.MILESTONES), solver.GAMMA)


def start_grid(
    points: int, classes: int, dim: int, init_std: float, seed: int, device: torch.device
) -> dict[str, Any]:
    """Return the state of P points before the first epoch, all with the same weights."""
    weight, bias = new_head(classes, dim, init_std, seed)
    weight = weight.repeat(points, 1).to(device)  # (P·C, D)
    bias = bias.repeat(points)[:, None].to(device)  # (P·C, 1)
    zeros = {"weight_velocity": torch.zeros_like(weight), "bias_velocity": torch.zeros_like(bias)}
    return {"weight": weight, "bias": bias, **zeros, "losses": []}


def solutions_of(state: dict[str, Any], points: int) -> list[Solution]:
    """Return the weight and the bias of each point."""
    weight, bias = state["weight"], state["bias"]
    parts = weight.view(points, -1, weight.shape[1]), bias.view(points, -1)
    return list(zip(*parts, strict=True))


def train_grid(
    rows: Rows, points: Sequence[Point], state: dict[str, Any], solver: CfgNode, seed: int
) -> Iterator[int]:
    """Train from the state's epoch to the end; yield the number of each epoch."""
    device = state["weight"].device
    rows = rows.near(device)

    def batches(epoch: int) -> Iterator[Chunk]:
        for indices, labels in epoch_batches(rows, solver.BATCH_SIZE, seed, epoch, device):
            yield rows.take(indices).to(device), labels

    def gradient(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, int]:
        gradient, losses = softmax_gradient(outputs.view(len(points), -1, len(labels)), labels)
        return gradient.flatten(0, 1), losses.sum((1, 2)), len(labels)

    return descend(points, state, solver, batches, gradient)


@torch.no_grad()
def descend(
    points: Sequence[Point],
    state: dict[str, Any],
    solver: CfgNode,
    batches: Callable[[int], Iterable[Chunk]],
    gradient_of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, int]],
) -> Iterator[int]:
    """Train on the batches of every epoch that is left; yield its number.

    `gradient_of` outputs (P·C, B) and labels is that of the summed loss, with the loss (P,) and the
    number of labels that count.
    """
    weight, bias = state["weight"], state["bias"]
    weight_velocity, bias_velocity = state["weight_velocity"], state["bias_velocity"]
    rates, decays = (
        torch.tensor([point[name] for point in points], device=weight.device)
        .repeat_interleave(len(weight) // len(points))
        .unsqueeze(1)  # (P·C, 1)
        for name in ("lr", "weight_decay")
    )
    decaying = bool(decays.any())
    for epoch in range(len(state["losses"]), solver.EPOCHS):
        epoch_rates = rates * rate_factor(solver, epoch)
        total, count = torch.zeros(len(points), device=weight.device), 0
        for features, labels in batches(epoch):
            outputs = torch.addmm(bias, weight, features.T)
            gradient, loss, counted = gradient_of(outputs, labels)
            weight_velocity.addmm_(gradient, features, beta=solver.MOMENTUM, alpha=1 / counted)
            bias_velocity.mul_(solver.MOMENTUM)
            bias_velocity.add_(gradient.sum(1, keepdim=True), alpha=1 / counted)
            if decaying:
                weight_velocity.addcmul_(weight, decays)
                bias_velocity.addcmul_(bias, decays)
            weight.addcmul_(weight_velocity, epoch_rates, value=-1)
            bias.addcmul_(bias_velocity, epoch_rates, value=-1)
            total += loss
            count += counted
        state["losses"].append((total / count).tolist())
        yield epoch + 1


def softmax_gradient(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy's gradient by outputs (P, C, n), and the losses (P, 1, n)."""
    log_p = outputs.log_softmax(1)
    own = labels.expand(len(outputs), 1, -1)  # (P, 1, n)
    losses = -log_p.gather(1, own)
    minus_one = torch.full(own.shape, -1.0, device=outputs.device)
    return log_p.exp_().scatter_add_(1, own, minus_one), losses


def epoch_batches(
    rows: Rows, batch_size: int, seed: int, epoch: int, device: torch.device
) -> Iterable[tuple[Tensor, Tensor]]:
    """Return (rows of the table, labels) of each batch of an epoch; the last may be smaller.

    Each image appears in one of its views.
    """
    order = permutation(seed, epoch, Stream.ORDER, len(rows))
    words = random_words(seed, epoch, Stream.VIEW_OF_EPOCH, 0, len(rows))
    views = (words % np.uint64(len(rows.indices))).astype(np.int64)
    indices = torch.from_numpy(rows.indices[views[order], order]).to(rows.table.device)
    labels = rows.labels[torch.from_numpy(order)].to(device)
    return zip(indices.split(batch_size), labels.split(batch_size), strict=True)


# L-BFGS


def fit_logistic(
    rows: Rows,
    classes: int,
    l2: float,
    max_iterations: int,
    device: torch.device,
    start: Solution | None = None,
) -> tuple[Tensor, Tensor, float]:
    """Return weight (C, D), bias (C,) and the objective reached, over all views of the rows."""
    dim = rows.table.shape[1]
    small = rows.indices.size * dim * 4 <= IN_MEMORY
    gathered = list(chunks_of(rows, device)) if small else []

    def value_and_gradients(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return objective(gathered or chunks_of(rows, device), weight, bias, l2)

    start = start or (torch.zeros(classes, dim), torch.zeros(classes))
    return _minimize(value_and_gradients, start, max_iterations, device)


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
        outputs = torch.addmm(bias[:, None], weight, features.T)  # (C, n)
        (gradient,), losses = softmax_gradient(outputs[None], labels)
        loss += losses.sum()
        weight_grad.addmm_(gradient, features)
        bias_grad += gradient.sum(1)
        count += len(labels)
    penalty = 0.5 * l2 * weight.square().sum(dtype=torch.float64)
    return loss / count + penalty, weight_grad / count + l2 * weight, bias_grad / count


def fit_binary(
    rows: Rows,
    weight_decay: float,
    max_iterations: int,
    device: torch.device,
    start: Solution | None = None,
) -> Solution:
    """Return weight (C, D) and bias (C,) of one binary regression per column of labels (n, C).

    Labels are 1 (present), 0 (absent) or -1 (ignored). Each class minimizes its summed
    loss + weight_decay/2 · ‖w‖², scikit-learn's objective at C = 1 / weight_decay. The classes are
    independent, so their sum, divided by the number of images, has the same minimum.
    """
    features = rows.take(torch.from_numpy(rows.indices[0])).to(device)
    known = rows.labels.T.to(device)
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
    start: Solution,
    max_iterations: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, float]:
    """Return weight and bias at the minimum, and the objective there."""
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
