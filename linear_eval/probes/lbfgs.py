"""Multinomial logistic regression by full-batch L-BFGS: no learning rate, no epochs, no chance.

Minimizes  mean cross-entropy + L2/2 · ‖W‖²  (the bias is not penalized). That is scikit-learn's
LogisticRegression at C = 1 / (L2 · rows).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
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
    weight, bias = start or (torch.zeros(classes, dim), torch.zeros(classes))
    weight, bias = weight.clone().to(device), bias.clone().to(device)
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=max_iterations,
        history_size=HISTORY,
        tolerance_grad=GRADIENT_TOLERANCE,
        tolerance_change=LOSS_TOLERANCE,
        line_search_fn="strong_wolfe",
    )

    # Every step needs all rows, so those that fit into memory are gathered once.
    small = rows.indices.size * dim * 4 <= IN_MEMORY
    gathered = list(chunks_of(rows, device)) if small else []

    def value_and_gradients() -> tuple[Tensor, Tensor, Tensor]:
        return objective(gathered or chunks_of(rows, device), weight, bias, l2)

    def closure() -> Tensor:
        loss, weight.grad, bias.grad = value_and_gradients()
        return loss

    optimizer.step(closure)
    return weight, bias, float(value_and_gradients()[0])


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
