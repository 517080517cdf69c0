"""Multinomial logistic regression by full-batch L-BFGS: no learning rate, no epochs, no chance.

Minimizes  mean cross-entropy + L2/2 · ‖W‖²  (the bias is not penalized). That is scikit-learn's
LogisticRegression at C = 1 / (L2 · rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from linear_eval.probes.sgd_grid import CHUNK, Rows

Chunk = tuple[Tensor, Tensor]  # features (n, D), labels (n,)

IN_MEMORY = 2**31  # bytes of features
HISTORY = 10
# The end: no entry of the gradient, or no step of the loss, is larger. float32 resolves no less.
GRADIENT_TOLERANCE = 1e-6
LOSS_TOLERANCE = 1e-10


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
