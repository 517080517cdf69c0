"""Optimizers, and learning rates as pure functions of progress: nothing here has a history."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fvcore.common.config import CfgNode

from kscl.errors import KsclError
from kscl.keys import continues

# MoCo's SGD decays every parameter; the LARS and AdamW recipes spare biases and norms.
DECAYS_EVERYTHING = ("sgd",)


def build_optimizer(cfg: CfgNode, given: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
    """Build the optimizer that the config names for a method's groups of parameters."""
    solver = cfg.SOLVER
    name, lr = solver.OPTIMIZER, learning_rate(cfg)
    everything = name in DECAYS_EVERYTHING
    groups = [
        part for group in given for part in split_by_decay(group, solver.WEIGHT_DECAY, everything)
    ]
    # On a CPU torch would by default take a small network's step tensor by tensor, in 5% of the
    # training time; on a GPU its default is fast.
    on_cpu = all(weight.device.type == "cpu" for group in groups for weight in group["params"])
    fused = True if on_cpu else None
    if name == "sgd":
        # torch's fused SGD fails when only some parameters have momentum, as after frozen epochs.
        fused = fused if not (continues(cfg) and solver.FREEZE_BACKBONE_EPOCHS) else None
        return torch.optim.SGD(groups, lr=lr, momentum=solver.MOMENTUM, fused=fused)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, fused=fused)
    return Lars(groups, lr, solver.MOMENTUM)


class Lars(torch.optim.Optimizer):
    """SimCLR's LARS: SGD in which every decayed parameter has a learning rate of its own.

        g ← ∇ + decay · w,   v ← momentum · v + lr · r · g,   w ← w − v

    with r = 0.001 ‖w‖ / ‖g‖, or 1 where a norm is 0 and for parameters that do not decay. timm's
    LARS divides by ‖∇‖ + decay · ‖w‖, and applies the learning rate after the momentum.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                gradient, decay = weight.grad, group["weight_decay"]
                if decay:
                    gradient = gradient + decay * weight
                    ratio = 0.001 * weight.norm() / gradient.norm()
                    gradient.mul_(torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0))
                velocity = self.state[weight].setdefault("velocity", torch.zeros_like(weight))
                weight.sub_(velocity.mul_(group["momentum"]).add_(gradient, alpha=group["lr"]))


def split_by_decay(
    group: Mapping[str, Any], weight_decay: float, decay_everything: bool
) -> list[dict[str, Any]]:
    """Return a group of parameters as one, or as two: matrices, which decay, and vectors."""
    decayed = [weight for weight in group["params"] if weight.ndim > 1 or decay_everything]
    spared = [weight for weight in group["params"] if weight.ndim <= 1 and not decay_everything]
    parts = [(decayed, weight_decay), (spared, 0.0)]
    return [{"weight_decay": decay, **group, "params": part} for part, decay in parts if part]


def total_steps(cfg: CfgNode, steps_per_epoch: int) -> int:
    """Return the number of steps of the whole run."""
    return cfg.SOLVER.MAX_STEPS or cfg.SOLVER.EPOCHS * steps_per_epoch


def check_schedule(cfg: CfgNode, steps_per_epoch: int) -> None:
    """Raise if the run ends before its warm-up does, or before a milestone."""
    total = total_steps(cfg, steps_per_epoch)
    late = [epoch for epoch in cfg.SOLVER.MILESTONES if epoch * steps_per_epoch >= total]
    if cfg.SOLVER.SCHEDULE == "step" and late:
        raise KsclError(
            f"SOLVER.MILESTONES {late[0]:g} is not inside the training, whose {total} steps "
            f"(SOLVER.MAX_STEPS, or EPOCHS) are {total / steps_per_epoch:.4g} epochs: choose "
            "earlier ones, or train longer."
        )
    if frozen_steps(cfg, steps_per_epoch) >= total:
        raise KsclError(
            f"SOLVER.FREEZE_BACKBONE_EPOCHS {cfg.SOLVER.FREEZE_BACKBONE_EPOCHS:g} takes all of the "
            f"{total} steps (SOLVER.MAX_STEPS, or EPOCHS), so the backbone would never be trained: "
            "shorten it, or train longer."
        )
    if round(cfg.SOLVER.WARMUP_EPOCHS * steps_per_epoch) >= total:
        raise KsclError(
            f"SOLVER.WARMUP_EPOCHS {cfg.SOLVER.WARMUP_EPOCHS:g} takes all of the {total} steps "
            "(SOLVER.MAX_STEPS, or EPOCHS): shorten it, or train longer."
        )


def frozen_steps(cfg: CfgNode, steps_per_epoch: int) -> int:
    """Return the number of steps at the start that train the projector alone."""
    epochs = cfg.SOLVER.FREEZE_BACKBONE_EPOCHS if continues(cfg) else 0
    return round(epochs * steps_per_epoch)


def learning_rate_at(cfg: CfgNode, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate of step 0, 1, 2, … of a run."""
    solver = cfg.SOLVER
    epoch = step / steps_per_epoch
    warmup_steps = round(solver.WARMUP_EPOCHS * steps_per_epoch)
    base = learning_rate(cfg)
    if continues(cfg) and step >= frozen_steps(cfg, steps_per_epoch):
        base *= solver.CONTINUED_LR_FACTOR
    # Always by steps: by epochs, the first one would have one learning rate.
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    if solver.LR_UPDATE == "epoch":
        epoch = float(step // steps_per_epoch)
    if solver.SCHEDULE == "step":
        return base * step_factor(epoch, solver.MILESTONES, solver.GAMMA)
    warmup = warmup_steps / steps_per_epoch
    end = solver.MAX_STEPS / steps_per_epoch if solver.MAX_STEPS else solver.EPOCHS
    return base * cosine_factor((epoch - warmup) / (end - warmup))


def cosine_factor(progress: float) -> float:
    """Return a factor that falls from 1 at progress 0 to 0 at progress 1."""
    return 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))


def step_factor(epoch: float, milestones: list[int], gamma: float) -> float:
    """Return `gamma` to the power of the number of milestones reached."""
    return gamma ** bisect.bisect_right(milestones, epoch)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all groups, each by its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def learning_rate(cfg: CfgNode) -> float:
    """Return the learning rate after linear scaling by the batch size, before any schedule."""
    if not cfg.SOLVER.SCALE_LR:
        return cfg.SOLVER.BASE_LR
    return cfg.SOLVER.BASE_LR * cfg.SOLVER.BATCH_SIZE / cfg.SOLVER.REFERENCE_BATCH_SIZE
