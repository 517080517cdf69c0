"""The training loop and its step: schedule, ranks, precision, and what is logged.

A step is a pure function of the saved state and of its number: the learning rate, the batch, its
views and every random stream follow from the number. A run that was killed therefore resumes from
its checkpoint as if nothing had happened.
"""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fvcore.common.config import CfgNode
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kscl.data.bad_images import BadImages
from kscl.data.loader import Batch, TrainLoader
from kscl.engine.knn import KnnCheck
from kscl.engine.metrics_log import RunLog
from kscl.engine.schedule import learning_rate_at, set_learning_rate
from kscl.engine.state import TrainState, Window, stopped
from kscl.errors import KsclError
from kscl.runtime.distributed import host_group, rank, world_size
from kscl.runtime.precision import AMP_TYPES, autocast
from kscl.views.sizes import size_at

log = logging.getLogger(__name__)

MOST_SKIPS = 30  # in a row; the loss scale, 65,536 at the start, is then below 1e-4
KNN_TOP1 = "knn_top1"  # in the log of metrics
COLLAPSED = 0.01  # spread of the embeddings: their mean is then nearly a unit vector


def train_steps(
    state: TrainState,
    loader: TrainLoader,
    knn: KnnCheck | None,
    run_log: RunLog,
    checkpoints: Path,
) -> Iterator[int]:
    """Train to the last step; a `yield` of the step says that the state is complete."""
    cfg = state.cfg
    begun = time.perf_counter()
    for batch in prefetched(loader, state.device):
        take_step(state, batch, checkpoints)
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
            top1 = knn.accuracy(state.learner.encoder.backbone, state.device)
            log.info("Epoch %d: kNN top-1 %.2f%%.", epoch, top1)
            run_log.write(state.step, {KNN_TOP1: top1})
        if within == 0:
            begun = time.perf_counter()
        yield state.step


def prefetched(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the batches with their views on the device.

    The copy to a GPU runs on a stream of its own, while the GPU still computes the step before.
    """
    if device.type == "cpu":
        yield from batches
        return
    beside = torch.cuda.Stream(device)
    for batch in batches:
        with torch.cuda.stream(beside):
            views = batch.views.to(device, non_blocking=True)
            small = None if batch.small is None else batch.small.to(device, non_blocking=True)
        now = torch.cuda.current_stream(device)
        now.wait_stream(beside)
        for copied in (views, small):
            if copied is not None:
                copied.record_stream(now)  # its memory is not used again before the step has ended
        yield batch._replace(views=views, small=small)


def check_numbers(state: TrainState, checkpoints: Path) -> None:
    """Raise if a step had NaN or infinity that has not been noticed yet."""
    try:
        state.learner.check_finite.finish()
    except KsclError as error:
        raise stopped(state, checkpoints, str(error)) from error


def take_step(state: TrainState, batch: Batch, checkpoints: Path | None = None) -> None:
    """Take one step of the optimizer, the dictionary and the key encoder."""
    cfg, learner, optimizer = state.cfg, state.learner, state.optimizer
    set_learning_rate(optimizer, learning_rate_at(cfg, state.step, state.steps_per_epoch))
    seed_step(cfg.SEED, state.step)
    views = to_device(batch.views, cfg, state.device)  # (B, Q+K, 3, H, W)
    parts = cfg.SOLVER.GRAD_ACCUM_STEPS
    smalls: Sequence[Tensor | None] = [None] * parts
    if batch.small is not None:
        smalls = to_device(batch.small, cfg, state.device).chunk(parts)  # (B, S, 3, h, w)
    totals: dict[str, Tensor] = {}
    chunks = zip(views.chunk(parts), batch.instances.chunk(parts), smalls, strict=True)
    for number, chunk in enumerate(chunks):
        with without_exchange(state.model) if number + 1 < parts else nullcontext():
            try:
                metrics = forward(state, *chunk)
            except KsclError as error:
                raise stopped(state, checkpoints, str(error)) from error
            state.scaler.scale(metrics["loss"] / parts).backward()
        for name, value in metrics.items():
            totals[name] = totals.get(name, 0) + value.detach() / parts
    state.window.add(totals)
    if cfg.SOLVER.CLIP_GRAD_NORM:
        state.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(learner.encoder.parameters(), cfg.SOLVER.CLIP_GRAD_NORM)
    state.skips.begin_step()
    state.scaler.step(optimizer)
    state.skips.end_step()
    state.scaler.update()
    if state.skips.in_a_row >= MOST_SKIPS:
        raise stopped(state, checkpoints, f"{MOST_SKIPS} steps in a row overflowed in fp16")
    optimizer.zero_grad()
    learner.after_step()
    state.step += 1


def forward(
    state: TrainState, views: Tensor, instances: Tensor, small: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the loss and the metrics of views (B, Q+K, 3, H, W) in the precision of the config."""
    amp = state.cfg.SOLVER.AMP
    with autocast(state.device, AMP_TYPES[amp]):
        return state.model(views, instances, small)


def without_exchange(model: nn.Module) -> AbstractContextManager[None]:
    """Keep gradients on this rank: ranks exchange them once per step, with the last chunk."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def to_device(views: Tensor, cfg: CfgNode, device: torch.device) -> Tensor:
    """Return views (B, V, 3, H, W) on the device, each view one dense block."""
    views = views.to(device, non_blocking=True).transpose(0, 1)  # (V, B, 3, H, W)
    if cfg.SOLVER.CHANNELS_LAST:
        views = views.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    else:
        views = views.contiguous()
    return views.transpose(0, 1)


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
    cfg, learner = state.cfg, state.learner
    before = {name: value.clone() for name, value in learner.state_dict().items()}
    count = cfg.SOLVER.BATCH_SIZE // (world_size() * cfg.SOLVER.GRAD_ACCUM_STEPS)
    generator = torch.Generator().manual_seed(rank())

    def noise(number: int, size: int) -> Tensor:
        shape = (count, number, 3, size, size)
        return to_device(torch.randn(shape, generator=generator), cfg, state.device)

    method, tiny = cfg.METHOD, cfg.VIEWS.SMALL
    size = size_at(cfg.INPUT.SIZE, state.step // state.steps_per_epoch)
    views = noise(method.NUM_QUERIES + method.NUM_SHOTS, size)
    small = noise(tiny.COUNT, tiny.SIZE) if tiny.COUNT else None
    for _ in range(2):
        begun = time.perf_counter()
        forward(state, views, torch.arange(count), small)["loss"].backward()
        if state.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    state.optimizer.zero_grad()
    learner.load_state_dict(before)
    return count / seconds


def report(state: TrainState, run_log: RunLog, waited: float) -> None:
    """Log the means since the last report, and warn of a collapse."""
    window, state.window = state.window, Window()
    means = {name: total / window.steps for name, total in window.over_ranks().items()}
    learning_rate = state.optimizer.param_groups[0]["lr"]
    if state.scaler.is_enabled():
        means |= {"loss_scale": state.scaler.get_scale(), "skipped_steps": state.skips.since_report}
        state.skips.since_report = 0
    run_log.report({"steps": window.steps, "learning_rate": learning_rate, **means}, waited)
    if means["embedding_spread"] < COLLAPSED:
        log.warning(
            "The embeddings have collapsed: all images look alike to the encoder (spread %.4f). "
            "Lower the learning rate (SOLVER.BASE_LR), warm up longer (SOLVER.WARMUP_EPOCHS), or "
            "let the key encoder follow more slowly (KEY_ENCODER.MOMENTUM).",
            means["embedding_spread"],
        )


def share_reasons(bad_images: BadImages) -> None:
    """Note what other ranks have met: DATA.MAX_BAD_FRACTION is the limit of all ranks together."""
    if world_size() == 1:
        return
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, bad_images.reasons, group=host_group())
    reasons = {index: reason for part in parts for index, reason in part.items()}
    if len(reasons) > len(bad_images.reasons):
        bad_images.note(reasons.items())
