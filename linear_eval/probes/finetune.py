"""Fine-tuning: the whole network trained on few labels, with learning rates for trunk and head.

The number is that of the last epoch; nothing is chosen on val, which is used once, at the end.
BatchNorm normalizes each rank's part of a batch by itself, and rank 0's statistics are kept.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from kscl.runtime.logs import LOGGER
from kscl.runtime.precision import autocast
from kscl.runtime.processes.distributed import rank
from kscl.runtime.processes.ranks import device
from kscl.views.normalize import normalize_exactly
from linear_eval.backbone import Frozen
from linear_eval.checkpoint import Saver
from linear_eval.data.images import LabeledImages, ViewsOfImages, load_batches
from linear_eval.data.views import geometry
from linear_eval.probes.outcome import Outcome
from linear_eval.probes.progress import Progress
from linear_eval.probes.view_training import LossOf, linear_head, train_on_views
from linear_eval.score import ranked_classes, score

log = logging.getLogger(LOGGER)

Json = dict[str, Any]
TEST_BATCH = 128


class Network(nn.Module):
    """A trunk that gives features and a linear head on them."""

    def __init__(self, trunk: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, C), float32, of normalized images."""
        features = self.trunk(images).float()
        with torch.autocast(features.device.type, enabled=False):
            return self.head(features)


def probe_finetune(
    cfg: CfgNode,
    frozen: Frozen,
    train: LabeledImages,
    val: LabeledImages,
    saver: Saver,
    saved: Json | None,
) -> list[Outcome]:
    """Train a copy of the backbone and a new head, and score them on val."""
    state = start(cfg, frozen, len(train.classes))

    def end_epoch(epoch: int) -> None:
        state.epochs.append(state.loss_sum / len(train))
        log.info("Epoch %d: train loss %.4f.", epoch, state.epochs[-1])

    loss_of = loss_on(state.module, frozen)
    train_on_views(cfg, train, state, saver, saved, base_lrs(cfg), loss_of, end_epoch)
    if rank() != 0:
        return []
    outputs = outputs_on(state.module, frozen, val, cfg)
    details = {
        "reported": "last epoch",
        "learning_rates": {"trunk": cfg.FINETUNE.TRUNK_LR, "head": cfg.FINETUNE.HEAD_LR},
        "epochs": cfg.SOLVER.EPOCHS,
        "curves": {"epoch": list(range(1, len(state.epochs) + 1)), "train_loss": state.epochs},
    }
    return [Outcome(score(ranked_classes(outputs), val.targets, val.classes), details)]


def start(cfg: CfgNode, frozen: Frozen, classes: int) -> Progress[Network]:
    """Return the state before the first step."""
    trunk = copy.deepcopy(frozen.module).requires_grad_(True)
    network = Network(trunk, linear_head(cfg, frozen, classes))
    groups = [{"params": list(part.parameters())} for part in (network.trunk, network.head)]
    decay, momentum = cfg.SOLVER.WEIGHT_DECAY, cfg.SOLVER.MOMENTUM
    return Progress(network, torch.optim.SGD(groups, 1.0, momentum, weight_decay=decay))


def base_lrs(cfg: CfgNode) -> dict[str, float]:
    """Return the learning rates of trunk and head by their config keys."""
    return {f"FINETUNE.{key}": cfg.FINETUNE[key] for key in ("TRUNK_LR", "HEAD_LR")}


def loss_on(network: Network, frozen: Frozen) -> LossOf:
    """Return the loss of images under the network in training, whose input is the backbone's."""

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        network.train()
        with autocast(frozen.device, frozen.amp):
            outputs = network(_inputs(frozen, images))
        return F.cross_entropy(outputs.float(), labels, reduction="sum")

    return loss_of


@torch.no_grad()
def outputs_on(network: Network, frozen: Frozen, images: LabeledImages, cfg: CfgNode) -> Tensor:
    """Return the logits (N, C) of center crops."""
    network.eval()
    shape = geometry(cfg)
    dataset = ViewsOfImages(images, lambda picture, epoch, number: [shape.center(picture)])
    starts = range(0, len(images), TEST_BATCH)
    batches = [[(0, i) for i in range(s, min(s + TEST_BATCH, len(images)))] for s in starts]
    found = []
    for batch in load_batches(dataset, batches, cfg.DATA.NUM_WORKERS):
        with autocast(frozen.device, frozen.amp):
            found.append(network(_inputs(frozen, batch.views[:, 0])).float().cpu())
    return torch.cat(found)


def _inputs(frozen: Frozen, images: Tensor) -> Tensor:
    inputs = normalize_exactly(images.to(device(), non_blocking=True), frozen.mean, frozen.std)
    return inputs.contiguous(memory_format=frozen.layout)
