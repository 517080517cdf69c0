"""Weighted nearest neighbors: the classifier, and a check of the backbone while it trains.

The classifier of instance discrimination (Wu et al., 2018) as the field uses it: neighbors by
cosine, each voting for its class with weight exp(similarity / temperature).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from kscl.data.loader import ViewDataset, load_in_workers
from kscl.data.open import open_source
from kscl.data.source import ImageSource, Labels
from kscl.errors import KsclError
from kscl.methods.batch_norm import in_mode
from kscl.runtime.distributed import gather, rank, world_size
from kscl.views.batch import Batch
from kscl.views.normalize import normalize
from kscl.views.sizes import last_size

BATCH_SIZE = 256
CHUNK, BLOCK = 1024, 65536  # test and train images that are compared at a time


class KnnCheck:
    """Accuracy on two sets of class folders, opened and compared before training begins."""

    def __init__(self, cfg: CfgNode) -> None:
        self.cfg = cfg
        self.train, train_labels = open_labeled(cfg.EVAL.KNN_TRAIN, cfg)
        self.val, val_labels = open_labeled(cfg.EVAL.KNN_VAL, cfg)
        if train_labels.classes != val_labels.classes:
            differing = sorted({*train_labels.classes} ^ {*val_labels.classes})
            raise KsclError(
                "EVAL.KNN_TRAIN and EVAL.KNN_VAL have different classes: "
                f"{', '.join(differing[:5])} are in one of them only. Give both the same folders."
            )
        self.train_labels = torch.from_numpy(train_labels.numbers)  # (N,)
        self.val_labels = torch.from_numpy(val_labels.numbers)  # (M,)

    def is_due(self, epoch: int) -> bool:
        """Return whether to check after this many epochs."""
        return epoch % self.cfg.EVAL.KNN_PERIOD == 0

    def accuracy(self, backbone: nn.Module, device: torch.device) -> float:
        """Return top-1 in percent; every rank computes its part of the features.

        Training features, 10 GB for ImageNet, are not gathered.
        """
        train, labels = features(backbone, self.train, self.train_labels, self.cfg, device)
        val, truth = features(backbone, self.val, self.val_labels, self.cfg, device)
        train, labels = (part[: own_count(self.train)] for part in (train, labels))
        val, truth = (gather(part)[: len(self.val)] for part in (val, truth))
        settings, classes = self.cfg.EVAL, int(self.train_labels.max()) + 1
        predicted = predict_over_ranks(
            *(train, labels, val, settings.KNN_K, settings.KNN_TEMPERATURE, classes)
        )
        return 100 * float((predicted == truth).float().mean())


def open_labeled(where: str, cfg: CfgNode) -> tuple[ImageSource, Labels]:
    """Open class folders; raise if the images have no classes."""
    source = open_source(where, cfg.DATA.CACHE_DIR, cfg.DATA.CACHE_GB)
    if source.labels is None:
        raise KsclError(f"{where} has no classes. Put the images of each class in a folder of it.")
    return source, source.labels


@torch.no_grad()
def features(
    backbone: nn.Module, source: ImageSource, labels: Tensor, cfg: CfgNode, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return features (n, D) of the center squares of this rank's images, and classes (n,)."""
    found, shown = [], []
    with in_mode(backbone, training=False):
        for batch in center_squares(source, cfg):
            images = normalize(batch.views[:, 0].to(device), cfg.INPUT.MEAN, cfg.INPUT.STD)
            found.append(backbone(images).float())
            shown.append(batch.instances)
    return torch.cat(found), labels[torch.cat(shown)].to(device)


def own_count(source: ImageSource) -> int:
    """Return how many of the images that this rank has seen are its own; the others come last."""
    count = -(-len(source) // world_size())
    return min(count, max(0, len(source) - rank() * count))


def center_squares(source: ImageSource, cfg: CfgNode) -> Iterator[Batch]:
    """Yield this rank's images, padded with others so that all ranks have equally many."""
    dataset = ViewDataset(source, [], 1, last_size(cfg.INPUT.SIZE), cfg.SEED)
    count = -(-len(source) // world_size())
    addresses = [(0, i % len(source)) for i in range(rank() * count, (rank() + 1) * count)]
    batches = [addresses[i : i + BATCH_SIZE] for i in range(0, count, BATCH_SIZE)]
    return iter(load_in_workers(dataset, batches, cfg.DATA.NUM_WORKERS))


@torch.no_grad()
def knn_predict(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    k: int = 20,
    temperature: float = 0.07,
    num_classes: int | None = None,
    chunk: int = CHUNK,
    block: int = BLOCK,
    device: torch.device | None = None,
) -> Tensor:
    """Predict the classes (M,) of test features (M, D) from train features (N, D) and labels (N,).

    `chunk` test images meet `block` train images at a time, so besides its arguments, which may be
    mapped from disk, it takes 4 · (block · D + chunk · block + chunk · D) bytes: 0.8 GiB at D =
    2048, however many images there are. `device` computes; by default that of the test features.
    """
    nearest, indices = _nearest(train_features, test_features, k, chunk, block, device)  # (M, k)
    classes = int(train_labels.max()) + 1 if num_classes is None else num_classes
    return _vote(nearest, train_labels.to(nearest.device)[indices], temperature, classes)


@torch.no_grad()
def predict_over_ranks(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    k: int,
    temperature: float,
    num_classes: int,
) -> Tensor:
    """Predict from the train features (n, D) of all ranks, without sending them: (M,).

    Each rank finds its own nearest neighbors of all test images; only these are merged.
    """
    near, indices = _nearest(train_features, test_features, k)  # (M, ≤ k)
    labels = train_labels[indices]
    missing = (0, k - near.shape[1])  # a rank may have fewer than k images
    near = F.pad(near, missing, value=-torch.inf)  # (M, k)
    near, labels = (
        torch.cat(gather(part[None]).unbind(), 1) for part in (near, F.pad(labels, missing))
    )  # (M, world · k)
    nearest, kept = near.topk(k, dim=1)
    return _vote(nearest, labels.gather(1, kept), temperature, num_classes)


def _nearest(
    train_features: Tensor,
    test_features: Tensor,
    k: int,
    chunk: int = CHUNK,
    block: int = BLOCK,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the largest cosines of each test feature, and the train features' indices: (M, k)."""
    device = device or test_features.device
    k = min(k, len(train_features))
    nearest = torch.full((len(test_features), k), -torch.inf, device=device)  # (M, k)
    indices = torch.zeros(len(test_features), k, dtype=torch.long, device=device)  # (M, k)
    chunk, block = min(chunk, len(test_features)), max(1, min(block, len(train_features)))
    room = torch.empty(chunk * block, device=device)
    for start in range(0, len(train_features), block):
        train = _unit(train_features[start : start + block], device)  # (n, D)
        for first in range(0, len(test_features), chunk):
            part = slice(first, first + chunk)
            test = _unit(test_features[part], device)  # (m, D)
            similarity = room[: len(test) * len(train)].view(len(test), len(train))
            torch.mm(test, train.T, out=similarity)
            near, near_index = similarity.topk(min(k, len(train)), dim=1)  # (m, k)
            # The k nearest of those known and those of this block.
            known = torch.cat([nearest[part], near], 1)
            known_index = torch.cat([indices[part], near_index + start], 1)
            nearest[part], kept = known.topk(k, dim=1)
            indices[part] = known_index.gather(1, kept)
        del train  # before the next block takes as much again
    return nearest, indices


def _vote(nearest: Tensor, labels: Tensor, temperature: float, num_classes: int) -> Tensor:
    """Return the class (M,) with most votes of neighbors with these cosines and labels (M, k)."""
    # Relative to the nearest: the same order, and exp cannot overflow at a low temperature.
    weight = ((nearest - nearest[:, :1]) / temperature).exp()  # (M, k)
    votes = weight.new_zeros(len(weight), num_classes)  # (M, C)
    votes.scatter_add_(1, labels, weight)
    return votes.argmax(1)  # (M,)


def _unit(features: Tensor, device: torch.device) -> Tensor:
    return F.normalize(features.to(device).float(), dim=1)
