"""The online probe: every epoch sees new views of the images, as in MoCo's main_lincls.py.

The reported number is that of the last epoch. Val is scored after every epoch for the curve only;
as the backbone is frozen, its val features never change and are computed once.

Batches, views and order do not depend on the number of ranks: each takes its part of the global
batch, and the gradients of the parts are added.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from PIL import Image
from torch import Tensor, nn

from kscl.data.loader import StepSampler
from kscl.data.view_dataset import Batch
from kscl.engine.schedule import set_learning_rate
from kscl.runtime.distributed import rank, world_size
from kscl.runtime.logs import LOGGER, progress
from linear_eval.backbone import Frozen
from linear_eval.checkpoint import Saver
from linear_eval.data.features import Features
from linear_eval.data.images import LabeledImages, ViewsOfImages, load_batches
from linear_eval.data.views import geometry
from linear_eval.errors import LinearEvalError
from linear_eval.probes.outcome import Classifier, Outcome
from linear_eval.probes.progress import Progress
from linear_eval.probes.sgd_grid import rate_factor
from linear_eval.rules import CENTER
from linear_eval.score import Score, ranked_classes, score
from linear_eval.splits import new_head

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
    if saved is not None:
        state.load_state_dict(saved["online"])
    steps = math.ceil(len(train) / cfg.SOLVER.BATCH_SIZE)  # per epoch; the last may be smaller
    sampler = train_sampler(cfg, len(train), state.step, steps * cfg.SOLVER.EPOCHS)
    batches = load_batches(ViewsOfImages(train, view_maker(cfg)), sampler, cfg.DATA.NUM_WORKERS)
    if rank() == 0:
        batches = progress(batches, "probe", steps * cfg.SOLVER.EPOCHS - state.step)
    for batch in batches:
        stopping = take_step(state, frozen, batch, train.targets, cfg.SOLVER, bool(saver.stop))
        if state.step % steps == 0:
            end_epoch(state, state.step // steps, len(train), val, val_features)
        saver.offer(state.step, lambda: {"online": state.state_dict()}, stopping)
    return outcome(state, val_score(state.module, val, val_features)[0])


def start(cfg: CfgNode, frozen: Frozen, classes: int) -> Progress[nn.Linear]:
    """Return the state before the first step."""
    head = nn.Linear(frozen.dim, classes)
    weight, bias = new_head(classes, frozen.dim, cfg.SOLVER.INIT_STD, cfg.SEED)
    head.load_state_dict({"weight": weight, "bias": bias})
    head.to(frozen.device)
    optimizer = torch.optim.SGD(
        head.parameters(),
        lr=cfg.SOLVER.BASE_LR,
        momentum=cfg.SOLVER.MOMENTUM,
        weight_decay=cfg.SOLVER.WEIGHT_DECAY,
    )
    return Progress(head, optimizer)


def take_step(
    state: Progress[nn.Linear],
    frozen: Frozen,
    batch: Batch,
    targets: Tensor,
    solver: CfgNode,
    stop: bool,
) -> bool:
    """Take one SGD step on the batch of all ranks; return whether any was asked to stop."""
    epoch, place = divmod(state.step, math.ceil(len(targets) / solver.BATCH_SIZE))
    in_batch = min(solver.BATCH_SIZE, len(targets) - place * solver.BATCH_SIZE)  # of all ranks
    set_learning_rate(state.optimizer, solver.BASE_LR * rate_factor(solver, epoch))
    loss = torch.zeros((), device=frozen.device)
    state.optimizer.zero_grad()
    if len(batch.instances):
        features = frozen.features(batch.views[:, 0])  # (b, D)
        frozen.check_finite(features)
        labels = targets[batch.instances].to(frozen.device)
        loss = F.cross_entropy(state.module(features), labels, reduction="sum")
        (loss / in_batch).backward()
    total, stopping = add_over_ranks(state.module, loss.detach(), stop)
    if not math.isfinite(total):
        raise LinearEvalError(
            f"The loss of step {state.step} is not finite at learning rate "
            f"{state.optimizer.param_groups[0]['lr']:g}. Lower SOLVER.BASE_LR."
        )
    state.optimizer.step()
    state.loss_sum += total
    state.step += 1
    return stopping


def add_over_ranks(head: nn.Linear, loss: Tensor, stop: bool) -> tuple[float, bool]:
    """Add the ranks' gradients, losses and requests to stop in one message."""
    if world_size() == 1:
        return float(loss), stop
    weights = [head.weight, head.bias]
    grads = [w.grad if w.grad is not None else torch.zeros_like(w) for w in weights]
    flat = torch.cat([*(g.flatten() for g in grads), loss.view(1), loss.new_tensor([float(stop)])])
    dist.all_reduce(flat)
    parts = flat.split([*(w.numel() for w in weights), 1, 1])
    for weight, part in zip(weights, parts, strict=False):
        weight.grad = part.view_as(weight)
    return float(parts[2]), bool(parts[3])


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
    state.loss_sum = 0.0
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


def train_sampler(cfg: CfgNode, num_images: int, first_step: int, last_step: int) -> StepSampler:
    """Return this rank's part of every batch; each epoch shows every image."""
    steps = (first_step, last_step)
    size, seed = cfg.SOLVER.BATCH_SIZE, cfg.SEED
    return StepSampler(num_images, size, seed, *steps, rank(), world_size(), drop_last=False)


def view_maker(cfg: CfgNode) -> Any:
    """Return a function that makes the one view of a picture that an epoch sees."""
    shape, seed = geometry(cfg), cfg.SEED

    def make(picture: Image.Image, epoch: int, number: int) -> list[Image.Image]:
        if cfg.INPUT.AUGMENT == CENTER:
            return [shape.center(picture)]
        return [shape.augmented(picture, seed, epoch, number)]

    return make
