"""Training: the state of a run, its step, and the loop around it.

A step is a pure function of the saved state and of its number: the learning rate, the batch, its
views and every random stream follow from the number. A run that was killed therefore resumes from
its checkpoint as if nothing had happened.
"""

from __future__ import annotations

import hashlib
import logging
import random
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from fvcore.common.config import CfgNode
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kscl.data.bad_images import BadImages
from kscl.data.loader import TrainLoader
from kscl.engine.knn import KnnCheck
from kscl.engine.metrics_log import RunLog
from kscl.engine.schedule import (
    build_optimizer,
    check_schedule,
    frozen_steps,
    learning_rate_at,
    set_learning_rate,
    total_steps,
)
from kscl.errors import KsclError
from kscl.methods.base import Method, build_method
from kscl.methods.keys import method_of
from kscl.run.checkpoint import find_checkpoints
from kscl.runtime.distributed import average_, gather, host_group, rank, world_size
from kscl.runtime.machine import avoid_broken_amx
from kscl.runtime.precision import (
    AMP_TYPES,
    autocast,
    compile_in_place,
    set_numerics,
    warn_of_emulation,
)
from kscl.views.batch import Batch
from kscl.views.device import Pending, apply_pending
from kscl.views.sizes import size_at

log = logging.getLogger(__name__)

MOST_SKIPS = 30  # in a row; the loss scale, 65,536 at the start, is then below 1e-4
KNN_TOP1 = "knn_top1"  # in the log of metrics


@dataclass
class Window:
    """Sums of the method's figures over this rank's steps since the last report."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0

    def add(self, figures: Mapping[str, Tensor]) -> None:
        """Add the figures of one step."""
        for name, value in figures.items():
            self.sums[name] = self.sums.get(name, 0) + value
        self.steps += 1

    def over_ranks(self) -> dict[str, float]:
        """Return the sums averaged over ranks."""
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
        values = gather(torch.stack(list(self.sums.values()))[None])  # (world, figures)
        return dict(zip(self.sums, values.T.tolist(), strict=True))


@dataclass
class Skips:
    """Steps that fp16's loss scaling has skipped because a gradient overflowed."""

    in_a_row: int = 0
    since_report: int = 0

    def begin_step(self) -> None:
        """Count a step as skipped, until the optimizer takes it."""
        self.in_a_row += 1
        self.since_report += 1

    def note_step(self, *_: object) -> None:
        """Note that the optimizer has stepped; it calls this itself."""
        self.in_a_row = 0
        self.since_report -= 1


class Late(NamedTuple):
    """Figures of a step on their way from a GPU to the host."""

    step: int
    names: tuple[str, ...]
    sums: Tensor
    arrived: torch.cuda.Event


@dataclass
class TrainState:
    """All that a step changes, and what it needs for that."""

    cfg: CfgNode
    method: Method
    model: nn.Module  # the method, or DistributedDataParallel around it
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    device: torch.device
    steps_per_epoch: int
    step: int = 0  # steps done
    seconds: float = 0.0  # of training, over all restarts
    window: Window = field(default_factory=Window)
    skips: Skips = field(default_factory=Skips)
    late: list[Late] = field(default_factory=list)
    checkpoints: Path | None = None  # the folder to name when a run stops

    @property
    def total_steps(self) -> int:
        """Return the number of steps of the whole run."""
        return total_steps(self.cfg, self.steps_per_epoch)


def build_state(
    cfg: CfgNode, num_images: int, steps_per_epoch: int, device: torch.device
) -> TrainState:
    """Build the method, with weights from the seed, and its optimizer: the same on all ranks."""
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
    if solver.AMP == "fp16" and device.type == "cpu":
        raise KsclError("SOLVER.AMP fp16 needs a GPU. Use SOLVER.AMP bf16 on a CPU.")
    torch.manual_seed(cfg.SEED)
    method = build_method(cfg, num_images).to(device)
    if solver.CHANNELS_LAST:
        method = method.to(memory_format=torch.channels_last)
    scaler = torch.amp.GradScaler(device.type, enabled=solver.AMP == "fp16")
    optimizer = build_optimizer(cfg, method.param_groups())
    state = TrainState(cfg, method, method, optimizer, scaler, device, steps_per_epoch)
    for encoder in method.encoders():
        compile_in_place(encoder, solver.COMPILE, device)
    if world_size() > 1:
        state.model = distributed(method)
    optimizer.register_step_post_hook(state.skips.note_step)
    return state


def distributed(method: Method) -> DistributedDataParallel:
    """Wrap the method so that gradients are averaged over ranks.

    Buffers are kept equal by `Method.after_step`: that is a fraction of the traffic, and gloo
    cannot send every type of buffer.
    """
    with warnings.catch_warnings():
        # The argument that torch recommends instead would still send all buffers once.
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
        return DistributedDataParallel(
            method,  # without device_ids, which would copy what is needed on the CPU to the GPU
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )


def check_ranks(cfg: CfgNode, ranks: int) -> None:
    """Raise if the batch cannot be divided among ranks and accumulation steps."""
    parts = ranks * cfg.SOLVER.GRAD_ACCUM_STEPS
    if cfg.SOLVER.BATCH_SIZE % parts:
        raise KsclError(
            f"SOLVER.BATCH_SIZE {cfg.SOLVER.BATCH_SIZE} cannot be divided evenly among {ranks} "
            f"processes with SOLVER.GRAD_ACCUM_STEPS {cfg.SOLVER.GRAD_ACCUM_STEPS}. Make it a "
            f"multiple of {parts}."
        )
    for keys, problem in method_of(cfg).check_part(cfg, cfg.SOLVER.BATCH_SIZE // parts):
        raise KsclError(f"{', '.join(keys)} on {ranks} processes: {problem}.")


def state_dict(state: TrainState) -> dict[str, Any]:
    """Return what a checkpoint holds of the state; all ranks call it."""
    check_late(state)
    window = {"sums": state.window.of_each_rank(), "steps": state.window.steps}
    finite = torch.stack([torch.isfinite(weight).all() for weight in state.method.parameters()])
    if not finite.all():
        raise stopped(state, "A weight is NaN or infinite")
    return {
        "learner": state.method.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "scaler": state.scaler.state_dict(),
        "step": state.step,
        "seconds": state.seconds,
        "window": window,
    }


def restore(state: TrainState, content: Mapping[str, Any]) -> None:
    """Set the state to what a checkpoint holds."""
    state.method.load_state_dict(content["learner"])
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


def stopped(state: TrainState, reason: str) -> KsclError:
    """Return the error that ends a run whose numbers went wrong."""
    kept = find_checkpoints(state.checkpoints) if state.checkpoints is not None else []
    learning_rate = state.optimizer.param_groups[0]["lr"]
    return KsclError(
        f"Training stopped in step {state.step} (epoch {state.step / state.steps_per_epoch:.2f}) "
        f"at learning rate {learning_rate:g}. {reason.rstrip('.')}. The last good checkpoint is "
        f"{kept[0] if kept else 'none yet'}. Resuming from it repeats the same steps, so start a "
        "run with other settings: a lower SOLVER.BASE_LR, a longer SOLVER.WARMUP_EPOCHS, "
        "SOLVER.CLIP_GRAD_NORM 1.0, or SOLVER.AMP off."
    )


def train_steps(
    state: TrainState, loader: TrainLoader, knn: KnnCheck | None, run_log: RunLog
) -> Iterator[int]:
    """Train to the last step; a `yield` of the step says that the state is complete."""
    cfg = state.cfg
    begun = time.perf_counter()
    for batch in prefetched(loader, cfg, state.device):
        take_step(state, batch)
        now = time.perf_counter()
        state.seconds += now - begun
        run_log.add_step(len(batch.views) * world_size(), now - begun)
        begun = now
        epoch, within = divmod(state.step, state.steps_per_epoch)
        at_end = state.step == state.total_steps
        if within == 0 or at_end or state.step % cfg.LOG.PERIOD == 0:
            report(state, run_log, loader.seconds_waited)
            share_reasons(loader.bad_images)
        if knn is not None and (at_end or (within == 0 and knn.is_due(epoch))):
            top1 = knn.accuracy(state.method.backbone, state.device)
            log.info("Epoch %d: kNN top-1 %.2f%%.", epoch, top1)
            run_log.write(state.step, {KNN_TOP1: top1})
        if within == 0:
            begun = time.perf_counter()
        yield state.step


def prefetched(batches: Iterable[Batch], cfg: CfgNode, device: torch.device) -> Iterator[Batch]:
    """Yield the batches; on a GPU they move there while it still computes the step before."""
    if device.type != "cuda":
        yield from batches
        return
    beside = torch.cuda.Stream(device)
    for batch in batches:
        with torch.cuda.stream(beside):
            moved = to_device(batch, cfg, device)
        now = torch.cuda.current_stream(device)
        now.wait_stream(beside)
        for copied in (moved.views, moved.small):
            if copied is not None:
                copied.record_stream(now)  # its memory is not used again before the step ends
        yield moved


def take_step(state: TrainState, batch: Batch) -> None:
    """Take one step of the optimizer and of the method."""
    cfg, method, optimizer = state.cfg, state.method, state.optimizer
    set_learning_rate(optimizer, learning_rate_at(cfg, state.step, state.steps_per_epoch))
    seed_step(cfg.SEED, state.step)
    batch = to_device(batch, cfg, state.device)
    parts = cfg.SOLVER.GRAD_ACCUM_STEPS
    totals: dict[str, Tensor] = {}
    is_frozen = state.step < frozen_steps(cfg, state.steps_per_epoch)
    with frozen_backbones(method) if is_frozen else nullcontext():
        for number, part in enumerate(batch.chunk(parts)):
            with without_exchange(state.model) if number + 1 < parts else nullcontext():
                figures = forward(state, part)
                state.scaler.scale(figures["loss"] / parts).backward()
            for name, value in figures.items():
                totals[name] = totals.get(name, 0) + value.detach() / parts
    state.window.add(totals)
    if cfg.SOLVER.CLIP_GRAD_NORM:
        state.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(method.parameters(), cfg.SOLVER.CLIP_GRAD_NORM)
    state.skips.begin_step()
    state.scaler.step(optimizer)
    state.scaler.update()
    if state.skips.in_a_row >= MOST_SKIPS:
        raise stopped(state, f"{MOST_SKIPS} steps in a row overflowed in fp16")
    optimizer.zero_grad()
    state.step += 1
    method.after_step(state.step / state.total_steps)


@contextmanager
def frozen_backbones(method: Method) -> Iterator[None]:
    """Keep the backbones as they are: no gradient is left, BatchNorm's statistics do not move.

    Gradients are computed and dropped, because DistributedDataParallel waits for all of them.
    """
    backbones = [encoder.backbone for encoder in method.encoders()]
    training = [it for backbone in backbones for it in backbone.modules() if it.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
    for backbone in backbones:
        backbone.zero_grad()


def forward(state: TrainState, batch: Batch) -> dict[str, Tensor]:
    """Return the loss and the figures of a batch in the precision of the config."""
    try:
        with autocast(state.device, AMP_TYPES[state.cfg.SOLVER.AMP]):
            figures: dict[str, Tensor] = state.model(batch)
    except torch.linalg.LinAlgError as error:  # NaN has no eigenvalues
        figures = {"eigenvalues": batch.views.new_tensor(torch.nan, dtype=torch.float32)}
        check_finite(state, batch.views, figures)
        raise stopped(state, str(error)) from error
    if not isinstance(figures, dict) or not {"loss", *state.method.figures} <= figures.keys():
        raise KsclError(
            f"The forward pass of METHOD.NAME {state.cfg.METHOD.NAME} must return a dict with "
            f"{', '.join(['loss', *state.method.figures])}, got "
            f"{', '.join(figures) if isinstance(figures, dict) else type(figures).__name__}."
        )
    check_finite(state, batch.views, figures)
    return figures


def check_finite(state: TrainState, views: Tensor, figures: Mapping[str, Tensor]) -> None:
    """Raise an error that names the first of the views and figures with NaN or infinity.

    At once on a CPU. On a GPU one step later, when the numbers have arrived without a host sync;
    `check_late` looks at those that are still on their way.
    """
    names = ("views", *figures)
    values = [one.detach().sum(dtype=torch.float32) * 0 for one in figures.values()]
    if views.device.type == "cpu":
        sums = torch.stack(values)
        if not torch.isfinite(sums).all():
            check_sums(state, state.step, names, [float(views.sum()), *sums.tolist()])
        return
    if state.late and state.late[0].step < state.step:
        check_late(state)
    sums = torch.stack([views.sum(dtype=torch.float32) * 0, *values])
    on_host = torch.empty(sums.shape, pin_memory=True).copy_(sums, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    state.late.append(Late(state.step, names, on_host, arrived))


def check_late(state: TrainState) -> None:
    """Raise an error if an earlier step had NaN or infinity."""
    late, state.late = state.late, []
    for step, names, sums, arrived in late:
        arrived.synchronize()
        check_sums(state, step, names, sums.tolist())


def check_sums(state: TrainState, step: int, names: Sequence[str], sums: Sequence[float]) -> None:
    """Raise an error that names the first sum that is not finite."""
    where = next((name for name, one in zip(names, sums, strict=True) if not isfinite(one)), None)
    if where is not None:
        fix = "lower the learning rate, lengthen the warm-up, or switch AMP off"
        if where == "views":
            fix = "look at the images and at how they are normalized"
        found = f"NaN or infinity on rank {rank()} at step {step} in the {where}"
        raise stopped(state, f"{found}: {fix}")


def without_exchange(model: nn.Module) -> AbstractContextManager[None]:
    """Keep gradients on this rank: ranks exchange them once per step, with the last part."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def to_device(batch: Batch, cfg: CfgNode, device: torch.device) -> Batch:
    """Return the batch with views on the device, finished there, each view one dense block."""

    def moved(views: Tensor, pending: Iterable[Pending]) -> Tensor:
        views = views.to(device, non_blocking=True)
        views = apply_pending(views, [step.to(device) for step in pending])
        views = views.transpose(0, 1)  # (V, B, 3, H, W)
        if cfg.SOLVER.CHANNELS_LAST:
            views = views.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
        else:
            views = views.contiguous()
        return views.transpose(0, 1)

    small = None if batch.small is None else moved(batch.small, batch.small_pending)
    views = moved(batch.views, batch.pending)
    return Batch(views, batch.instances, batch.bad, small)


def seed_step(seed: int, step: int) -> None:
    """Seed dropout and the like for one step, so that no random state needs saving."""
    digest = hashlib.sha256(f"{seed} {step} {rank()}".encode()).digest()
    number = int.from_bytes(digest[:7])
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def warm_up(state: TrainState) -> float:
    """Run two passes over noise that leave no trace; return the last one's images per second.

    DistributedDataParallel rearranges its buckets of gradients after the first backward pass.
    Without this, a resumed run would add them up in another order than one that was not stopped.
    """
    cfg, views = state.cfg, state.method.views(state.cfg)
    before = {name: value.clone() for name, value in state.method.state_dict().items()}
    count = cfg.SOLVER.BATCH_SIZE // (world_size() * cfg.SOLVER.GRAD_ACCUM_STEPS)
    generator = torch.Generator().manual_seed(rank())

    def noise(number: int, size: int) -> Tensor:
        return torch.randn((count, number, 3, size, size), generator=generator)

    full = noise(views.count, size_at(cfg.INPUT.SIZE, state.step // state.steps_per_epoch))
    small = None if views.small is None else noise(views.small.count, views.small.size)
    batch = to_device(Batch(full, torch.arange(count), [], small), cfg, state.device)
    for _ in range(2):
        begun = time.perf_counter()
        forward(state, batch)["loss"].backward()
        if state.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    state.optimizer.zero_grad()
    state.method.load_state_dict(before)
    return count / seconds


def report(state: TrainState, run_log: RunLog, waited: float) -> None:
    """Log the means since the last report, and what the method warns of."""
    window, state.window = state.window, Window()
    means = {name: total / window.steps for name, total in window.over_ranks().items()}
    learning_rate = state.optimizer.param_groups[0]["lr"]
    if state.scaler.is_enabled():
        means |= {"loss_scale": state.scaler.get_scale(), "skipped_steps": state.skips.since_report}
        state.skips.since_report = 0
    run_log.report({"steps": window.steps, "learning_rate": learning_rate, **means}, waited)
    for warning in state.method.report_warnings(means):
        log.warning("%s", warning)


def share_reasons(bad_images: BadImages) -> None:
    """Note what other ranks have met: DATA.MAX_BAD_FRACTION is the limit of all ranks together."""
    if world_size() == 1:
        return
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, bad_images.reasons, group=host_group())
    reasons = {index: reason for part in parts for index, reason in part.items()}
    if len(reasons) > len(bad_images.reasons):
        bad_images.note(reasons.items())
