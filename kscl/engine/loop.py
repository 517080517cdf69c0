"""The training loop: steps, schedule, ranks, precision and checkpoints.

A step is a pure function of the saved state and of its number: the learning rate, the batch, its
views and every random stream follow from the number. A run that was killed therefore goes on from
its checkpoint as if nothing had happened.
"""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kscl.data.loader import Batch, TrainLoader
from kscl.engine.metrics_log import RunLog
from kscl.engine.schedule import learning_rate_at, set_learning_rate
from kscl.engine.state import Training, Window, save, stopped
from kscl.errors import KsclError
from kscl.method.learner import Learner
from kscl.runtime.distributed import average_, rank, world_size
from kscl.runtime.launch import any_rank
from kscl.runtime.precision import AMP_TYPES, autocast
from kscl.runtime.signals import StopRequest
from kscl.views.normalize import normalize

log = logging.getLogger(__name__)

COLLAPSED = 0.01  # spread of the embeddings: their mean is then nearly a unit vector


def train(
    training: Training,
    loader: TrainLoader,
    folder: Path,
    run_log: RunLog,
    stop: StopRequest,
    about: Callable[[], dict[str, Any]],
    check: Callable[[int], dict[str, float]],
) -> bool:
    """Go on to the end, or until a signal asks to stop; whether the end was reached.

    `about()` is what a checkpoint holds beside the training state, `check(epoch)` gives figures
    to log after an epoch. The folder is that of the checkpoints.
    """
    cfg = training.cfg
    begun = time.perf_counter()
    for batch in loader:
        take_step(training, batch, folder)
        now = time.perf_counter()
        training.seconds += now - begun
        run_log.add_step(len(batch.views) * world_size(), now - begun)
        begun = now
        epoch, within = divmod(training.step, training.steps_per_epoch)
        if within == 0 or training.step % cfg.LOG.PERIOD == 0:
            report(training, run_log, loader.seconds_waited)
        if within == 0:
            run_log.write(training.step, check(epoch))
            begun = time.perf_counter()
        at_end = training.step == training.total_steps
        stopping = any_rank(bool(stop)) and not at_end
        if stopping or at_end or checkpoint_due(cfg, training.step, epoch, within):
            save(training, folder, about())
        if stopping:
            log.info("asked to stop: step %d is saved, --resume goes on", training.step)
            return False
    return True


def take_step(training: Training, batch: Batch, folder: Path | None = None) -> None:
    """One step of the optimiser, the dictionary and the key encoder."""
    cfg, learner, optimizer = training.cfg, training.learner, training.optimizer
    set_learning_rate(optimizer, learning_rate_at(cfg, training.step, training.steps_per_epoch))
    seed_step(cfg.SEED, training.step)
    views = to_device(batch.views, cfg, training.device)  # (B, K+1, 3, H, W)
    parts = cfg.SOLVER.GRAD_ACCUM_STEPS
    totals: dict[str, Tensor] = {}
    cut = zip(views.chunk(parts), batch.instances.chunk(parts), strict=True)
    for number, part in enumerate(cut):
        with gradients_stay_here(training.model) if number + 1 < parts else nullcontext():
            try:
                figures = forward(training, *part)
            except KsclError as error:
                raise stopped(training, folder, str(error)) from error
            training.scaler.scale(figures["loss"] / parts).backward()
        for name, value in figures.items():
            totals[name] = totals.get(name, 0) + value.detach() / parts
    training.window.add(totals)
    if cfg.SOLVER.CLIP_GRAD_NORM:
        training.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(learner.encoder.parameters(), cfg.SOLVER.CLIP_GRAD_NORM)
    training.scaler.step(optimizer)
    training.scaler.update()
    optimizer.zero_grad()
    average_(batch_norm_statistics(learner))
    learner.after_step()
    training.step += 1


def forward(training: Training, views: Tensor, instances: Tensor) -> dict[str, Tensor]:
    amp = training.cfg.SOLVER.AMP
    with autocast(training.device, AMP_TYPES[amp]):
        return training.model(views, instances.to(training.device))


def gradients_stay_here(model: nn.Module) -> AbstractContextManager[None]:
    """Ranks exchange gradients once a step, with the last part."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def batch_norm_statistics(learner: Learner) -> list[Tensor]:
    """Ranks see other images, but a checkpoint has one state: these are averaged every step."""
    encoders = [learner.encoder, learner.key_encoder]
    return [
        buffer
        for encoder in encoders
        if encoder is not None
        for buffer in encoder.buffers()
        if buffer.is_floating_point()
    ]


def to_device(views: Tensor, cfg: CfgNode, device: torch.device) -> Tensor:
    """Views (B, K+1, 3, H, W) as the encoder takes them: normalized, each view one dense block."""
    views = views.to(device, non_blocking=True).transpose(0, 1)  # (K+1, B, 3, H, W)
    if cfg.SOLVER.CHANNELS_LAST:
        views = views.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    else:
        views = views.contiguous()
    if views.dtype == torch.uint8:
        views = normalize(views, cfg.INPUT.MEAN, cfg.INPUT.STD)
    return views.transpose(0, 1)


def seed_step(seed: int, step: int) -> None:
    """Dropout and its like draw from streams that begin anew every step: nothing to save."""
    digest = hashlib.sha256(f"{seed} {step} {rank()}".encode()).digest()
    number = int.from_bytes(digest[:7])
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def settle(training: Training) -> float:
    """Two passes over noise, which leave no trace; how many images a second the last one did.

    DistributedDataParallel arranges its buckets of gradients anew after the first backward pass.
    Without this, a resumed run would add them up in another order than one that was not stopped.
    """
    cfg, learner = training.cfg, training.learner
    before = {name: value.clone() for name, value in learner.state_dict().items()}
    count = cfg.SOLVER.BATCH_SIZE // (world_size() * cfg.SOLVER.GRAD_ACCUM_STEPS)
    shape = (count, cfg.METHOD.NUM_SHOTS + 1, 3, cfg.INPUT.SIZE, cfg.INPUT.SIZE)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(rank()))
    views = to_device(noise, cfg, training.device)
    for _ in range(2):
        begun = time.perf_counter()
        forward(training, views, torch.arange(count))["loss"].backward()
        if training.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    training.optimizer.zero_grad()
    learner.load_state_dict(before)
    return count / seconds


def report(training: Training, run_log: RunLog, waited: float) -> None:
    """Log the means since the last report, and warn of a collapse."""
    window, training.window = training.window, Window()
    means = {name: float(total) / window.steps for name, total in window.over_ranks().items()}
    rate = training.optimizer.param_groups[0]["lr"]
    run_log.report({"steps": window.steps, "learning_rate": rate, **means}, waited)
    if means["embedding_spread"] < COLLAPSED:
        log.warning(
            "the embeddings have collapsed: all images look alike to the encoder (spread %.4f). "
            "Lower the learning rate, warm up longer (SOLVER.WARMUP_EPOCHS), or let the key "
            "encoder follow more slowly (KEY_ENCODER.MOMENTUM)",
            means["embedding_spread"],
        )


def checkpoint_due(cfg: CfgNode, step: int, epoch: int, within: int) -> bool:
    period = cfg.CHECKPOINT
    by_step = period.PERIOD_STEPS and step % period.PERIOD_STEPS == 0
    return bool(by_step) or (within == 0 and epoch % period.PERIOD_EPOCHS == 0)
