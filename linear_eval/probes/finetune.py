"""Fine-tuning: the whole network trained on few labels, with learning rates for trunk and head.

The number is that of the last epoch; nothing is chosen on val, which is used once, at the end.
Batches, views and order do not depend on the number of ranks, and the gradients of their parts are
added; BatchNorm normalizes each rank's part by itself, and rank 0's statistics are kept.
"""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from kscl.data.view_dataset import Batch
from kscl.runtime.distributed import rank, world_size
from kscl.runtime.logs import LOGGER, progress
from kscl.runtime.precision import autocast
from kscl.runtime.ranks import device
from kscl.views.normalize import normalize_exactly
from linear_eval.backbone import Frozen
from linear_eval.checkpoint import Saver
from linear_eval.data.images import LabeledImages, ViewsOfImages, load_batches
from linear_eval.data.views import geometry
from linear_eval.errors import LinearEvalError
from linear_eval.probes.online import train_sampler, view_maker
from linear_eval.probes.outcome import Outcome
from linear_eval.probes.progress import Progress
from linear_eval.probes.sgd_grid import rate_factor
from linear_eval.score import ranked_classes, score
from linear_eval.splits import new_head

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
        return self.head(self.trunk(images).float())


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
    if saved is not None:
        state.load_state_dict(saved["finetune"])
    steps = math.ceil(len(train) / cfg.SOLVER.BATCH_SIZE)  # per epoch; the last may be smaller
    sampler = train_sampler(cfg, len(train), state.step, steps * cfg.SOLVER.EPOCHS)
    batches = load_batches(ViewsOfImages(train, view_maker(cfg)), sampler, cfg.DATA.NUM_WORKERS)
    if rank() == 0:
        batches = progress(batches, "fine-tuning", steps * cfg.SOLVER.EPOCHS - state.step)
    for batch in batches:
        stopping = take_step(state, frozen, batch, train.targets, cfg.SOLVER, bool(saver.stop))
        if state.step % steps == 0:
            state.epochs.append(state.loss_sum / len(train))
            state.loss_sum = 0.0
            log.info("Epoch %d: train loss %.4f.", len(state.epochs), state.epochs[-1])
        saver.offer(state.step, lambda: {"finetune": state.state_dict()}, stopping)
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
    head = nn.Linear(frozen.dim, classes)
    weight, bias = new_head(classes, frozen.dim, cfg.SOLVER.INIT_STD, cfg.SEED)
    head.load_state_dict({"weight": weight, "bias": bias})
    trunk = copy.deepcopy(frozen.module).requires_grad_(True)
    network = Network(trunk, head.to(frozen.device))
    groups = [
        {"params": list(network.trunk.parameters()), "base_lr": cfg.FINETUNE.TRUNK_LR},
        {"params": list(network.head.parameters()), "base_lr": cfg.FINETUNE.HEAD_LR},
    ]
    decay, momentum = cfg.SOLVER.WEIGHT_DECAY, cfg.SOLVER.MOMENTUM
    return Progress(network, torch.optim.SGD(groups, 1.0, momentum, weight_decay=decay))


def take_step(
    state: Progress[Network],
    frozen: Frozen,
    batch: Batch,
    targets: Tensor,
    solver: CfgNode,
    stop: bool,
) -> bool:
    """Take one SGD step on the batch of all ranks; return whether any was asked to stop."""
    epoch, place = divmod(state.step, math.ceil(len(targets) / solver.BATCH_SIZE))
    in_batch = min(solver.BATCH_SIZE, len(targets) - place * solver.BATCH_SIZE)  # of all ranks
    for group in state.optimizer.param_groups:
        group["lr"] = group["base_lr"] * rate_factor(solver, epoch)
    loss = torch.zeros((), device=frozen.device)
    state.optimizer.zero_grad(set_to_none=False)
    state.module.train()
    if len(batch.instances):
        labels = targets[batch.instances].to(frozen.device)
        with autocast(frozen.device, frozen.amp):
            outputs = state.module(_inputs(frozen, batch.views[:, 0]))
        loss = F.cross_entropy(outputs.float(), labels, reduction="sum")
        (loss / in_batch).backward()
    total, stopping = _over_ranks(state.module, loss.detach(), stop)
    if not math.isfinite(total):
        raise LinearEvalError(
            f"The loss of step {state.step} is not finite. Lower FINETUNE.TRUNK_LR or "
            "FINETUNE.HEAD_LR."
        )
    state.optimizer.step()
    state.loss_sum += total
    state.step += 1
    return stopping


def _over_ranks(network: Network, loss: Tensor, stop: bool) -> tuple[float, bool]:
    """Add the ranks' gradients, losses and requests to stop; take rank 0's statistics."""
    if world_size() == 1:
        return float(loss), stop
    for parameter in network.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
    for buffer in network.buffers():
        dist.broadcast(buffer, 0)
    totals = torch.stack([loss, loss.new_tensor(float(stop))])
    dist.all_reduce(totals)
    return float(totals[0]), bool(totals[1])


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
