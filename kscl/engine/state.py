"""The state of a run: built from a config, saved whole, restored to the bit."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kscl.engine.schedule import build_optimizer, check_schedule, total_steps
from kscl.errors import KsclError
from kscl.methods.build import build_learner
from kscl.methods.learner import Learner
from kscl.run.checkpoint import CONTAINER_BYTES, bytes_of, find_checkpoints
from kscl.runtime.distributed import average_, gather, rank, world_size
from kscl.runtime.machine import avoid_broken_amx
from kscl.runtime.precision import compile_in_place, set_numerics, warn_of_emulation

# Tensors of a parameter's size that each optimizer keeps.
MOMENTS = {"sgd": 1, "lars": 1, "adamw": 2}


@dataclass
class Window:
    """Sums of the learner's metrics over this rank's steps since the last report."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add the metrics of one step."""
        if set(metrics) != set(self.sums):  # first step, or resumed from a release with other ones
            self.sums, self.steps = {}, 0
        for name, value in metrics.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.steps += 1

    def over_ranks(self) -> dict[str, float]:
        """Return the sums averaged over ranks."""
        if not self.sums:
            return {}
        values = torch.stack(list(self.sums.values()))
        average_([values])
        return dict(zip(self.sums, values.tolist(), strict=True))

    def of_each_rank(self) -> dict[str, list[float]]:
        """Return the sums of all ranks, in the order of ranks.

        A checkpoint keeps these, not their mean: a rank that resumed from the mean would add its
        next steps to another number and report other last bits.
        """
        if not self.sums:
            return {}
        values = gather(torch.stack(list(self.sums.values()))[None])  # (world, metrics)
        return dict(zip(self.sums, values.T.tolist(), strict=True))


@dataclass
class Skips:
    """Steps that fp16's loss scaling has skipped because a gradient overflowed."""

    in_a_row: int = 0
    since_report: int = 0
    taken: bool = True  # whether the optimizer has stepped since `begin_step`

    def note_step(self, *_: object) -> None:
        """Note that the optimizer has stepped; it calls this itself."""
        self.taken = True

    def begin_step(self) -> None:
        """Expect a step."""
        self.taken = False

    def end_step(self) -> None:
        """Count a step that was skipped."""
        self.in_a_row = 0 if self.taken else self.in_a_row + 1
        self.since_report += not self.taken


@dataclass
class TrainState:
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
    skips: Skips = field(default_factory=Skips)

    @property
    def total_steps(self) -> int:
        """Return the number of steps of the whole run."""
        return total_steps(self.cfg, self.steps_per_epoch)


def build_state(
    cfg: CfgNode, num_images: int, steps_per_epoch: int, device: torch.device
) -> TrainState:
    """Build the learner, with weights from the seed, and its optimizer: the same on all ranks."""
    check_ranks(cfg, world_size())
    check_schedule(cfg, steps_per_epoch)
    solver = cfg.SOLVER
    if solver.AMP == "bf16" and device.type == "cpu":
        avoid_broken_amx()
    set_numerics(
        tf32=solver.TF32,
        cudnn_benchmark=solver.CUDNN_BENCHMARK,
        deterministic=solver.DETERMINISTIC,
    )
    warn_of_emulation(solver.AMP, device)
    if cfg.SOLVER.AMP == "fp16" and device.type == "cpu":
        raise KsclError("SOLVER.AMP fp16 needs a GPU. Use SOLVER.AMP bf16 on a CPU.")
    torch.manual_seed(cfg.SEED)
    learner = build_learner(cfg, num_images).to(device)
    if cfg.SOLVER.CHANNELS_LAST:
        learner = learner.to(memory_format=torch.channels_last)
    for encoder in (learner.encoder, learner.key_encoder):
        if encoder is not None:
            compile_in_place(encoder, solver.COMPILE, device)
    model: nn.Module = learner
    if world_size() > 1:
        model = distributed(learner)
    scaler = torch.amp.GradScaler(device.type, enabled=cfg.SOLVER.AMP == "fp16")
    optimizer = build_optimizer(cfg, learner)
    state = TrainState(cfg, learner, model, optimizer, scaler, device, steps_per_epoch)
    optimizer.register_step_post_hook(state.skips.note_step)
    return state


def distributed(learner: Learner) -> DistributedDataParallel:
    """Wrap the learner so that gradients are averaged over ranks.

    Buffers are kept equal by the learner and by `take_step`: that is a fraction of the traffic,
    and gloo cannot send every type of buffer.
    """
    with warnings.catch_warnings():
        # The argument that torch recommends instead would still send all buffers once.
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
        return DistributedDataParallel(
            learner,  # without device_ids, which would copy what is needed on the CPU to the GPU
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )


def check_ranks(cfg: CfgNode, ranks: int) -> None:
    """Raise if the batch cannot be divided among ranks, accumulation steps and groups."""
    parts = ranks * cfg.SOLVER.GRAD_ACCUM_STEPS
    if cfg.SOLVER.BATCH_SIZE % parts:
        raise KsclError(
            f"SOLVER.BATCH_SIZE {cfg.SOLVER.BATCH_SIZE} cannot be divided evenly among {ranks} "
            f"processes with SOLVER.GRAD_ACCUM_STEPS {cfg.SOLVER.GRAD_ACCUM_STEPS}. Make it a "
            f"multiple of {parts}."
        )
    groups, images = cfg.KEY_ENCODER.BATCH_NORM_GROUPS, cfg.SOLVER.BATCH_SIZE // parts
    if groups > 1 and (images % groups or images < 2 * groups):
        raise KsclError(
            f"KEY_ENCODER.BATCH_NORM_GROUPS {groups} needs {groups} equal groups of 2 or more "
            f"images, but a forward pass on each of {ranks} processes has {images}. Choose a "
            f"smaller divisor of {images}, e.g. 1 with several processes: keys are shuffled among "
            "these too."
        )


def check_room(state: TrainState, folder: Path) -> None:
    """Raise if the disk of an existing folder has no room for one checkpoint."""
    trained = [weight for weight in state.learner.parameters() if weight.requires_grad]
    moments = MOMENTS[state.cfg.SOLVER.OPTIMIZER] * bytes_of(trained)
    needed = bytes_of(state.learner.state_dict()) + moments + CONTAINER_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise KsclError(
            f"The disk of OUTPUT_DIR {folder} has {free / 2**20:,.1f} MiB free, but a checkpoint "
            f"takes {needed / 2**20:,.1f} MiB. Make room, or choose another OUTPUT_DIR."
        )


def state_dict(state: TrainState, folder: Path) -> dict[str, Any]:
    """Return what a checkpoint holds of the state; all ranks call it."""
    window = {"sums": state.window.of_each_rank(), "steps": state.window.steps}
    finite = torch.stack([torch.isfinite(weight).all() for weight in state.learner.parameters()])
    if not finite.all():
        raise stopped(state, folder, "A weight is NaN or infinite")
    return {
        "learner": state.learner.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "scaler": state.scaler.state_dict(),
        "step": state.step,
        "seconds": state.seconds,
        "window": window,
    }


def restore(state: TrainState, content: Mapping[str, Any]) -> None:
    """Set the state to what a checkpoint holds."""
    state.learner.load_state_dict(content["learner"])
    state.optimizer.load_state_dict(content["optimizer"])
    state.scaler.load_state_dict(content["scaler"])
    state.step = content["step"]
    state.seconds = content["seconds"]
    saved = content["window"]
    sums = {name: _own_sum(sums, state.device) for name, sums in saved["sums"].items()}
    state.window = Window(sums, saved["steps"])


def _own_sum(sums: Sequence[float], device: torch.device) -> Tensor:
    """Return this rank's sum, or the mean if the number of ranks has changed."""
    own = sums[rank()] if len(sums) == world_size() else sum(sums) / len(sums)
    return torch.tensor(own, device=device)


def stopped(state: TrainState, folder: Path | None, reason: str) -> KsclError:
    """Return the error that ends a run whose numbers went wrong."""
    kept = find_checkpoints(folder) if folder is not None else []
    learning_rate = state.optimizer.param_groups[0]["lr"]
    return KsclError(
        f"Training stopped in step {state.step} (epoch {state.step / state.steps_per_epoch:.2f}) "
        f"at learning rate {learning_rate:g}. {reason.rstrip('.')}. The last good checkpoint is "
        f"{kept[0] if kept else 'none yet'}. Resuming from it repeats the same steps, so start a "
        "run with other settings: a lower SOLVER.BASE_LR, a longer SOLVER.WARMUP_EPOCHS, "
        "SOLVER.CLIP_GRAD_NORM 1.0, or SOLVER.AMP off."
    )
