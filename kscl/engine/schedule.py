"""Optimisers, and learning rates as pure functions of progress: nothing here has a history."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from typing import Any

import torch
from fvcore.common.config import CfgNode
from timm.optim import Lars
from torch import nn

# MoCo's SGD decays every parameter; the LARS and AdamW recipes spare biases and norms.
DECAYS_EVERYTHING = ("sgd",)


def build_optimizer(cfg: CfgNode, module: nn.Module) -> torch.optim.Optimizer:
    solver = cfg.SOLVER
    name, decay, rate = solver.OPTIMIZER, solver.WEIGHT_DECAY, learning_rate(cfg)
    groups = parameter_groups(module.named_parameters(), decay, name in DECAYS_EVERYTHING)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=solver.MOMENTUM)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=rate)
    # Lars adapts the rate of those groups only that are decayed, as the paper has it.
    return Lars(groups, lr=rate, momentum=solver.MOMENTUM)


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float, decay_everything: bool
) -> list[dict[str, Any]]:
    """Trained parameters in one group, or in two: matrices, which decay, and vectors."""
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for _, parameter in parameters:
        if parameter.requires_grad:
            matrix = parameter.ndim > 1
            (decayed if matrix or decay_everything else spared).append(parameter)
    groups = [(decayed, weight_decay), (spared, 0.0)]
    return [{"params": group, "weight_decay": decay} for group, decay in groups if group]


def learning_rate_at(cfg: CfgNode, step: int, steps_per_epoch: int) -> float:
    """The learning rate of step 0, 1, 2, … of a run."""
    solver = cfg.SOLVER
    epoch = step / steps_per_epoch
    warmup_steps = round(solver.WARMUP_EPOCHS * steps_per_epoch)
    base = learning_rate(cfg)
    if step < warmup_steps:  # always moves by steps, or else the first epoch would stand still
        return base * (step + 1) / warmup_steps
    if solver.LR_UPDATE == "epoch":
        epoch = float(step // steps_per_epoch)
    if solver.SCHEDULE == "step":
        return base * step_factor(epoch, solver.MILESTONES, solver.GAMMA)
    warmup = warmup_steps / steps_per_epoch
    return base * cosine_factor((epoch - warmup) / (solver.EPOCHS - warmup))


def cosine_factor(progress: float) -> float:
    """From 1 at the start to 0 at the end of [0, 1]."""
    return 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))


def step_factor(epoch: float, milestones: list[int], gamma: float) -> float:
    """`gamma` to the power of the milestones that have been reached."""
    return gamma ** bisect.bisect_right(milestones, epoch)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def learning_rate(cfg: CfgNode) -> float:
    if not cfg.SOLVER.SCALE_LR:
        return cfg.SOLVER.BASE_LR
    return cfg.SOLVER.BASE_LR * cfg.SOLVER.BATCH_SIZE / cfg.SOLVER.REFERENCE_BATCH_SIZE
