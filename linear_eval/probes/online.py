"""The online probe: every epoch sees new views of the images, as in MoCo's main_lincls.py.

The reported number is that of the last epoch. Val is scored after every epoch for the curve only;
as the backbone is frozen, its val features never change and are computed once.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from kscl.runtime.logs import LOGGER
from linear_eval.backbone import Frozen
from linear_eval.checkpoint import Saver
from linear_eval.data.features import Features
from linear_eval.data.images import LabeledImages
from linear_eval.probes.outcome import Classifier, Outcome
from linear_eval.probes.progress import Progress
from linear_eval.probes.view_training import LossOf, linear_head, train_on_views
from linear_eval.rules import CENTER
from linear_eval.score import Score, ranked_classes, score

log = logging.getLogger(LOGGER)

Json = dict[str, Any]


def probe_online(
    cfg: CfgNode,
    frozen: Frozen,
    train: LabeledImages,
    val: LabeledImages,
    val_features: Features,
    saver: Saver,
    saved: Json | None,
) -> Outcome:
    """Train a linear layer on new views in every epoch and score it on val."""
    state = start(cfg, frozen, len(train.classes))

    def end(epoch: int) -> None:
        end_epoch(state, epoch, len(train), val, val_features)

    base_lrs, loss_of = {"SOLVER.BASE_LR": cfg.SOLVER.BASE_LR}, loss_on(state.module, frozen)
    train_on_views(cfg, train, state, saver, saved, base_lrs, loss_of, end)
    return outcome(state, val_score(state.module, val, val_features)[0])


def start(cfg: CfgNode, frozen: Frozen, classes: int) -> Progress[nn.Linear]:
    """Return the state before the first step."""
    head = linear_head(cfg, frozen, classes)
    optimizer = torch.optim.SGD(
        head.parameters(),
        lr=cfg.SOLVER.BASE_LR,
        momentum=cfg.SOLVER.MOMENTUM,
        weight_decay=cfg.SOLVER.WEIGHT_DECAY,
    )
    return Progress(head, optimizer)


def loss_on(head: nn.Linear, frozen: Frozen) -> LossOf:
    """Return the loss of images under the head on frozen features."""

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        features = frozen.features(images)  # (b, D)
        frozen.check_finite(features)
        return F.cross_entropy(head(features), labels, reduction="sum")

    return loss_of


def end_epoch(
    state: Progress[nn.Linear], epoch: int, images: int, val: LabeledImages, val_features: Features
) -> None:
    """Add a row to the curve, and log it."""
    result, val_loss = val_score(state.module, val, val_features)
    row = {
        "epoch": epoch,
        "lr": state.optimizer.param_groups[0]["lr"],
        "train_loss": state.loss_sum / images,
        "val_loss": val_loss,
        **{f"val_{name}": value for name, value in result.metrics.items()},
    }
    state.epochs.append(row)
    log.info(
        "Epoch %d: train loss %.4f, val top-1 %.2f.",
        *(row["epoch"], row["train_loss"], row["val_top1"]),
        extra={"data": row},
    )


@torch.no_grad()
def val_score(head: nn.Linear, val: LabeledImages, features: Features) -> tuple[Score, float]:
    """Return scores and loss on val."""
    device = head.weight.device
    parts = [head(part.to(device)).cpu() for part in features.of_view(CENTER).split(65536)]
    outputs = torch.cat(parts)
    loss = float(F.cross_entropy(outputs, val.targets))
    return score(ranked_classes(outputs), val.targets, val.classes), loss


def outcome(state: Progress[nn.Linear], result: Score) -> Outcome:
    """Return the result of the last epoch, with the best one marked as picked on val."""
    best = max(state.epochs, key=lambda row: row["val_top1"])
    picked = {"epoch": best["epoch"], "top1": best["val_top1"], "picked_on": "val"}
    details = {
        "reported": "last epoch",
        "best_epoch_picked_on_val": picked,
        "curves": {name: [row[name] for row in state.epochs] for name in state.epochs[0]},
    }
    remark = f"last epoch; best {picked['top1']:.2f} in epoch {picked['epoch']}, picked on val"
    head = Classifier(state.module.weight.detach().cpu(), state.module.bias.detach().cpu())
    return Outcome(result, details, remark, head)
