"""The training that the online probe and fine-tuning share: new views in every epoch, plain SGD.

Batches, views and order do not depend on the number of ranks: each takes its part of the global
batch, and the gradients of the parts are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from fvcore.common.config import CfgNode
from PIL import Image
from torch import Tensor, nn

from kscl.data.loader import StepSampler
from kscl.data.view_dataset import Batch
from kscl.runtime.logs import progress
from kscl.runtime.processes.distributed import rank, world_size
from linear_eval.backbone import Frozen
from linear_eval.checkpoint import Saver
from linear_eval.data.images import LabeledImages, ViewsOfImages, load_batches
from linear_eval.data.views import geometry
from linear_eval.errors import LinearEvalError
from linear_eval.probes.progress import Progress
from linear_eval.probes.sgd_grid import rate_factor
from linear_eval.rules import CENTER
from linear_eval.splits import new_head

Json = dict[str, Any]
LossOf = Callable[[Tensor, Tensor], Tensor]  # images (b, 3, H, W), labels (b,) → their summed loss


def train_on_views(
    cfg: CfgNode,
    train: LabeledImages,
    state: Progress[Any],
    saver: Saver,
    saved: Json | None,
    base_lrs: Mapping[str, float],
    loss_of: LossOf,
    end_epoch: Callable[[int], None],
) -> None:
    """Train from the saved state, if there is one, to the end of the last epoch.

    `base_lrs` holds the learning rate of every parameter group by its config key.
    """
    if saved is not None:
        state.load_state_dict(saved[cfg.PROBE])
    steps = math.ceil(len(train) / cfg.SOLVER.BATCH_SIZE)  # per epoch; the last may be smaller
    sampler = train_sampler(cfg, len(train), state.step, steps * cfg.SOLVER.EPOCHS)
    batches = load_batches(ViewsOfImages(train, view_maker(cfg)), sampler, cfg.DATA.NUM_WORKERS)
    if rank() == 0:
        batches = progress(batches, f"probe {cfg.PROBE}", steps * cfg.SOLVER.EPOCHS - state.step)
    for batch in batches:
        stop = bool(saver.stop)
        stopping = sgd_step(state, batch, train.targets, cfg.SOLVER, base_lrs, loss_of, stop)
        if state.step % steps == 0:
            end_epoch(state.step // steps)
            state.loss_sum = 0.0
        saver.offer(state.step, lambda: {cfg.PROBE: state.state_dict()}, stopping)


def sgd_step(
    state: Progress[Any],
    batch: Batch,
    targets: Tensor,
    solver: CfgNode,
    base_lrs: Mapping[str, float],
    loss_of: LossOf,
    stop: bool,
) -> bool:
    """Take one step on the batch of all ranks; return whether any was asked to stop."""
    epoch, place = divmod(state.step, math.ceil(len(targets) / solver.BATCH_SIZE))
    in_batch = min(solver.BATCH_SIZE, len(targets) - place * solver.BATCH_SIZE)  # of all ranks
    for group, base_lr in zip(state.optimizer.param_groups, base_lrs.values(), strict=True):
        group["lr"] = base_lr * rate_factor(solver, epoch)
    device = next(state.module.parameters()).device
    loss = torch.zeros((), device=device)
    state.optimizer.zero_grad()
    if len(batch.instances):
        loss = loss_of(batch.views[:, 0], targets[batch.instances].to(device))
        (loss / in_batch).backward()
    total, stopping = _add_over_ranks(state.module, loss.detach(), stop)
    if not math.isfinite(total):
        keys = " or ".join(base_lrs)
        raise LinearEvalError(f"The loss of step {state.step} is not finite. Lower {keys}.")
    state.optimizer.step()
    state.loss_sum += total
    state.step += 1
    return stopping


def _add_over_ranks(module: nn.Module, loss: Tensor, stop: bool) -> tuple[float, bool]:
    """Add gradients, losses and requests to stop in one message; take rank 0's buffers."""
    if world_size() == 1:
        return float(loss), stop
    weights = list(module.parameters())
    grads = [w.grad if w.grad is not None else torch.zeros_like(w) for w in weights]
    flat = torch.cat([*(g.flatten() for g in grads), loss.view(1), loss.new_tensor([float(stop)])])
    dist.all_reduce(flat)
    *parts, total, stopping = flat.split([*(w.numel() for w in weights), 1, 1])
    for weight, part in zip(weights, parts, strict=True):
        weight.grad = part.view_as(weight)
    for buffer in module.buffers():
        dist.broadcast(buffer, 0)
    return float(total), bool(stopping)


def linear_head(cfg: CfgNode, frozen: Frozen, classes: int) -> nn.Linear:
    """Return a new linear layer on the features, on their device."""
    head = nn.Linear(frozen.dim, classes)
    weight, bias = new_head(classes, frozen.dim, cfg.SOLVER.INIT_STD, cfg.SEED)
    head.load_state_dict({"weight": weight, "bias": bias})
    return head.to(frozen.device)


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
