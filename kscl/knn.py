"""Weighted nearest neighbours: the quickest answer to "are these features any good?"

The classifier of instance discrimination (Wu et al., 2018) as the field uses it: neighbours by
cosine, each voting for its class with weight exp(similarity / temperature).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kscl.errors import KsclError


@torch.no_grad()
def knn_predict(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    k: int = 20,
    temperature: float = 0.07,
    num_classes: int | None = None,
    chunk: int = 1024,
    block: int = 65536,
    device: torch.device | None = None,
) -> Tensor:
    """Classes (M,) of test features (M, D), from train features (N, D) with their labels (N,).

    `chunk` test images meet `block` train images at a time, so beside its arguments, which may be
    mapped from disk, it takes 4 · (block · D + chunk · block + chunk · D) bytes: 0.8 GiB at D =
    2048, however many images there are. `device` computes; by default where the features are.
    """
    _check(train_features, train_labels, test_features, k, temperature)
    device = device or test_features.device
    k = min(k, len(train_features))
    nearest = torch.full((len(test_features), k), -torch.inf, device=device)  # (M, k)
    places = torch.zeros(len(test_features), k, dtype=torch.long, device=device)  # (M, k)
    chunk, block = min(chunk, len(test_features)), min(block, len(train_features))
    room = torch.empty(chunk * block, device=device)
    for start in range(0, len(train_features), block):
        train = _unit(train_features[start : start + block], device)  # (n, D)
        for first in range(0, len(test_features), chunk):
            part = slice(first, first + chunk)
            test = _unit(test_features[part], device)  # (m, D)
            similarity = room[: len(test) * len(train)].view(len(test), len(train))
            torch.mm(test, train.T, out=similarity)
            near, near_at = similarity.topk(min(k, len(train)), dim=1)  # (m, k)
            # The k best of those known and those of this block.
            known = torch.cat([nearest[part], near], 1)
            known_at = torch.cat([places[part], near_at + start], 1)
            nearest[part], kept = known.topk(k, dim=1)
            places[part] = known_at.gather(1, kept)
        del train  # before the next block takes as much again
    # Relative to the nearest: the same order, and exp cannot overflow at a low temperature.
    weight = ((nearest - nearest[:, :1]) / temperature).exp()  # (M, k)
    classes = int(train_labels.max()) + 1 if num_classes is None else num_classes
    votes = weight.new_zeros(len(weight), classes)  # (M, C)
    votes.scatter_add_(1, train_labels.to(device)[places], weight)
    return votes.argmax(1)  # (M,)


def _unit(features: Tensor, device: torch.device) -> Tensor:
    return F.normalize(features.to(device).float(), dim=1)


def _check(train: Tensor, labels: Tensor, test: Tensor, k: int, temperature: float) -> None:
    if train.ndim != 2 or test.ndim != 2 or train.shape[1] != test.shape[1]:
        raise KsclError(
            f"features must be (N, D) and (M, D), not {tuple(train.shape)} and {tuple(test.shape)}"
        )
    if not len(train) or not len(test):
        raise KsclError("there are no features to compare: one of the two sets of images is empty")
    if labels.shape != train.shape[:1]:
        raise KsclError(f"{len(train)} features need as many labels, not {tuple(labels.shape)}")
    if k < 1 or temperature <= 0:
        raise KsclError(f"k = {k} and temperature {temperature}: both must be greater than 0")
