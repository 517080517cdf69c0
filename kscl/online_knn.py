"""A nearest-neighbour check of the backbone while it trains: quick, and off unless asked for."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from kscl.augment import normalise
from kscl.data import Batch, ViewDataset, load_in_workers
from kscl.distributed import gather, rank, world_size
from kscl.encoder import in_mode
from kscl.errors import KsclError
from kscl.knn import knn_predict
from kscl.sources import ImageSource, Labels, open_source

IMAGES_AT_ONCE = 256


class KnnCheck:
    """Two sets of class folders, opened and compared before training begins."""

    def __init__(self, cfg: CfgNode) -> None:
        self.cfg = cfg
        self.train, train_labels = open_labelled(cfg.EVAL.KNN_TRAIN, cfg)
        self.val, val_labels = open_labelled(cfg.EVAL.KNN_VAL, cfg)
        if train_labels.classes != val_labels.classes:
            differing = sorted({*train_labels.classes} ^ {*val_labels.classes})
            raise KsclError(
                f"EVAL.KNN_TRAIN and EVAL.KNN_VAL have other classes: {', '.join(differing[:5])} "
                "are in one of them only"
            )
        self.train_labels = torch.from_numpy(train_labels.numbers)  # (N,)
        self.val_labels = torch.from_numpy(val_labels.numbers)  # (M,)

    def accuracy(self, backbone: nn.Module, device: torch.device) -> float:
        """Top-1 in per cent; every rank computes its share of the features."""
        train, labels = features(backbone, self.train, self.train_labels, self.cfg, device)
        val, truth = features(backbone, self.val, self.val_labels, self.cfg, device)
        settings = self.cfg.EVAL
        predicted = knn_predict(train, labels, val, settings.KNN_K, settings.KNN_TEMPERATURE)
        return 100 * float((predicted == truth).float().mean())


def open_labelled(where: str, cfg: CfgNode) -> tuple[ImageSource, Labels]:
    source = open_source(where, cfg.DATA.CACHE_DIR)
    if source.labels is None:
        raise KsclError(f"{where} has no classes: put the images of each class in a folder of it")
    return source, source.labels


@torch.no_grad()
def features(
    backbone: nn.Module, source: ImageSource, labels: Tensor, cfg: CfgNode, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Features (N, D) of the middle squares of all images, and their classes (N,)."""
    found, shown = [], []
    with in_mode(backbone, training=False):
        for batch in middle_squares(source, cfg):
            images = normalise(batch.views[:, 0].to(device), cfg.INPUT.MEAN, cfg.INPUT.STD)
            found.append(backbone(images).float())
            shown.append(batch.instances)
    index = gather(torch.cat(shown).to(device))
    return gather(torch.cat(found)), labels.to(device)[index]


def middle_squares(source: ImageSource, cfg: CfgNode) -> Iterator[Batch]:
    """This rank's share of the images, once each but for a few that make the shares equal."""
    dataset = ViewDataset(source, [], 1, cfg.INPUT.SIZE, cfg.SEED)
    share = -(-len(source) // world_size())
    places = [(0, i % len(source)) for i in range(rank() * share, (rank() + 1) * share)]
    batches = [places[i : i + IMAGES_AT_ONCE] for i in range(0, share, IMAGES_AT_ONCE)]
    return iter(load_in_workers(dataset, batches, cfg.DATA.NUM_WORKERS))  # type: ignore[arg-type]
