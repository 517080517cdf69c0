"""The state of a run: built from a config, saved whole, restored to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kscl.engine.checkpoint import find_checkpoints, save_checkpoint
from kscl.engine.schedule import build_optimizer
from kscl.errors import KsclError
from kscl.method.build import build_learner
from kscl.method.learner import Learner
from kscl.runtime.distributed import average_, rank, world_size


@dataclass
class Window:
    """Sums of the learner's figures over the steps since the last report."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0

    def add(self, figures: Mapping[str, Tensor]) -> None:
        if set(figures) != set(self.sums):  # the first step, or one after a release with other ones
            self.sums, self.steps = {}, 0
        for name, value in figures.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.steps += 1

    def over_ranks(self) -> dict[str, Tensor]:
        """The sums, averaged over ranks."""
        if not self.sums:
            return {}
        values = torch.stack(list(self.sums.values()))
        average_([values])
        return dict(zip(self.sums, values.unbind(), strict=True))


@dataclass
class Training:
    """All that a step changes, and what it needs for that."""

    cfg: CfgNode
    learner: Learner
    model: nn.Module  # the learner, or DistributedDataParallel around it
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    device: torch.device
    steps_per_epoch: int
    step: int = 0  # steps done
    seconds: float = 0.0  # of training, over all restarts
    window: Window = field(default_factory=Window)
    inputs: dict[str, str] = field(default_factory=dict)  # SHA-256 of the weights it started from

    @property
    def total_steps(self) -> int:
        return self.cfg.SOLVER.EPOCHS * self.steps_per_epoch


def build_training(
    cfg: CfgNode, num_images: int, steps_per_epoch: int, device: torch.device
) -> Training:
    """A learner with weights from the seed and its optimiser, the same on all ranks."""
    check_ranks(cfg, world_size())
    if cfg.SOLVER.AMP == "fp16" and device.type == "cpu":
        raise KsclError("SOLVER.AMP fp16 needs a GPU; a CPU can do bf16")
    torch.manual_seed(cfg.SEED)
    learner = build_learner(cfg, num_images).to(device)
    if cfg.SOLVER.CHANNELS_LAST:
        learner = learner.to(memory_format=torch.channels_last)
    model: nn.Module = learner
    if world_size() > 1:
        model = distributed(learner, device)
    scaler = torch.amp.GradScaler(device.type, enabled=cfg.SOLVER.AMP == "fp16")
    optimizer = build_optimizer(cfg, learner)
    return Training(cfg, learner, model, optimizer, scaler, device, steps_per_epoch)


def distributed(learner: Learner, device: torch.device) -> DistributedDataParallel:
    """Gradients are averaged here; the learner and `take_step` keep buffers the same themselves.

    That is a fraction of the traffic, and gloo cannot send every type of buffer.
    """
    with warnings.catch_warnings():
        # The name that torch puts in its place would still send all buffers once.
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
        return DistributedDataParallel(
            learner,
            device_ids=[device.index] if device.type == "cuda" else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )


def check_ranks(cfg: CfgNode, ranks: int) -> None:
    parts = ranks * cfg.SOLVER.GRAD_ACCUM_STEPS
    if cfg.SOLVER.BATCH_SIZE % parts:
        raise KsclError(
            f"SOLVER.BATCH_SIZE {cfg.SOLVER.BATCH_SIZE} cannot be shared evenly by {ranks} "
            f"processes in {cfg.SOLVER.GRAD_ACCUM_STEPS} parts each: make it a multiple of {parts}"
        )


def save(training: Training, folder: Path, about: Mapping[str, Any]) -> None:
    """Rank 0 writes what all ranks share."""
    window = {name: float(total) for name, total in training.window.over_ranks().items()}
    if rank() != 0:
        return
    if not all(torch.isfinite(weight).all() for weight in training.learner.parameters()):
        raise stopped(training, folder, "a weight is NaN or infinite")
    content = {
        **about,
        "learner": training.learner.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scaler": training.scaler.state_dict(),
        "step": training.step,
        "seconds": training.seconds,
        "window": {"sums": window, "steps": training.window.steps},
        "inputs": training.inputs,
    }
    save_checkpoint(folder, training.step, content, training.cfg.CHECKPOINT.KEEP)


def restore(training: Training, content: Mapping[str, Any]) -> None:
    training.learner.load_state_dict(content["learner"])
    training.optimizer.load_state_dict(content["optimizer"])
    training.scaler.load_state_dict(content["scaler"])
    training.step = content["step"]
    training.seconds = content["seconds"]
    training.inputs = dict(content.get("inputs", {}))
    saved = content["window"]
    sums = {
        name: torch.tensor(total, device=training.device) for name, total in saved["sums"].items()
    }
    training.window = Window(sums, saved["steps"])


def stopped(training: Training, folder: Path | None, reason: str) -> KsclError:
    kept = find_checkpoints(folder) if folder is not None else []
    rate = training.optimizer.param_groups[0]["lr"]
    return KsclError(
        f"training stopped in step {training.step} (epoch "
        f"{training.step / training.steps_per_epoch:.2f}) at learning rate {rate:g}: {reason}. "
        f"The last good checkpoint is {kept[0] if kept else 'none yet'}; to resume from it repeats "
        "the same steps, so start a run with other settings: a lower SOLVER.BASE_LR, a longer "
        "SOLVER.WARMUP_EPOCHS, SOLVER.CLIP_GRAD_NORM 1.0, or SOLVER.AMP off"
    )
