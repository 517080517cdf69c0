"""Fine-tune a detector: Detectron2's steps in a loop that stops on request and resumes exactly."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from detectron2.config import CfgNode
from detectron2.engine import AMPTrainer, HookBase, SimpleTrainer, hooks
from detectron2.engine.defaults import default_writers
from detectron2.modeling import build_model
from detectron2.solver import build_lr_scheduler, build_optimizer
from detectron2.utils import comm
from detectron2.utils.events import CommonMetricPrinter, EventStorage
from fvcore.nn.precise_bn import get_bn_modules
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from detection.convert.weights import load_weights
from detection.data.sets import RunSets
from detection.train.checkpoint import (
    check_room_for,
    forget_metrics_after,
    restore_state,
    save_state,
)
from detection.train.loader import build_train_loader, seed_everything
from kscl.runtime.processes.ranks import any_rank
from kscl.runtime.processes.signals import StopRequest

LINES_EVERY = 20  # iterations
Saved = tuple[Path, Mapping[str, Any]]  # a checkpoint and its content

log = logging.getLogger(__name__)


class Stopped(Exception):
    """The run was asked to stop; its state is on disk."""


class _SeedEachStep(HookBase):
    """Seed what is drawn in a step (proposals, RoIs) by its number, also after a restart."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def before_step(self) -> None:
        seed_everything(self.seed, "step", self.trainer.iter, comm.get_rank())


class _FirstLine(HookBase):
    """Print a line after the first iteration: on a slow machine the next one takes long."""

    def __init__(self, iterations: int) -> None:
        self.printer = CommonMetricPrinter(iterations)

    def after_step(self) -> None:
        if self.trainer.iter == self.trainer.start_iter:
            self.printer.write()


@dataclass
class _Training:
    """What one rank trains, and with what."""

    cfg: CfgNode
    model: nn.Module
    trainer: SimpleTrainer
    start: int = 0  # iterations done before


def train(
    cfg: CfgNode,
    sets: RunSets,
    saved: Saved | None,
    about: Callable[[], dict[str, Any]],
    stop: StopRequest,
) -> nn.Module:
    """Return the fine-tuned model, from the weights of the config or from a checkpoint.

    `about()` is what a checkpoint holds beside the state of the training. `Stopped` is raised
    once a signal to stop has been received and the state is on disk.
    """
    dicts = sets.train_dicts(cfg)
    training = _build(cfg, dicts, sets.bad_images, stop)
    trainer, model = training.trainer, training.model
    if saved is not None:
        training.start = restore_state(*saved, trainer, model)
    elif cfg.MODEL.WEIGHTS:
        load_weights(model, cfg.MODEL.WEIGHTS)
    if comm.is_main_process():
        folder = Path(cfg.OUTPUT_DIR)
        check_room_for(folder, model)
        forget_metrics_after(folder, training.start - 1)
        writers = default_writers(cfg.OUTPUT_DIR, cfg.SOLVER.MAX_ITER)
        periodic = hooks.PeriodicWriter(writers, period=LINES_EVERY)
        trainer.register_hooks([_FirstLine(cfg.SOLVER.MAX_ITER), periodic])
    workers = cfg.DATALOADER.NUM_WORKERS
    trainer.data_loader = build_train_loader(
        cfg, dicts, cfg.SEED, workers, training.start, sets.bad_images
    )
    log.info("Training starts at iteration %d of %d.", training.start, cfg.SOLVER.MAX_ITER)
    if training.start < cfg.SOLVER.MAX_ITER:
        _loop(training, about, stop)
    _share_buffers(model)
    return model


def _build(
    cfg: CfgNode, dicts: list[dict[str, Any]], bad_images: dict[str, str], stop: StopRequest
) -> _Training:
    """Build model, optimizer and hooks, the same on every rank and in every restart."""
    seed_everything(cfg.SEED, "model")
    model = build_model(cfg)
    parallel = _parallel(model)
    optimizer = build_optimizer(cfg, model)
    trainer_type = AMPTrainer if cfg.SOLVER.AMP.ENABLED else SimpleTrainer
    trainer = trainer_type(parallel, None, optimizer)
    trainer.register_hooks(
        [
            _SeedEachStep(cfg.SEED),
            hooks.IterationTimer(),
            hooks.LRScheduler(optimizer, build_lr_scheduler(cfg, optimizer)),
        ]
    )
    if cfg.TEST.PRECISE_BN.ENABLED and get_bn_modules(parallel):
        # Another order of images than the training's.
        loader = build_train_loader(cfg, dicts, cfg.SEED + 1, workers=0, bad_images=bad_images)
        batches = _until_stopped(loader, stop)
        exact = hooks.PreciseBN(0, parallel, batches, cfg.TEST.PRECISE_BN.NUM_ITER)
        trainer.register_hooks([exact])
    return _Training(cfg, model, trainer)


def _loop(training: _Training, about: Callable[[], dict[str, Any]], stop: StopRequest) -> None:
    """Run Detectron2's loop to the end, saving now and then, before the end and when stopped."""
    cfg, trainer = training.cfg, training.trainer
    trainer.start_iter, trainer.max_iter = training.start, cfg.SOLVER.MAX_ITER
    trainer.iter = training.start
    with EventStorage(training.start) as trainer.storage:
        try:
            trainer.before_train()
            for iteration in range(training.start, trainer.max_iter):
                trainer.iter = iteration
                trainer.before_step()
                trainer.run_step()
                trainer.after_step()
                done = iteration + 1
                stopping = any_rank(bool(stop)) and done < trainer.max_iter
                if comm.is_main_process() and (stopping or _is_due(cfg, done)):
                    save_state(Path(cfg.OUTPUT_DIR), done, trainer, training.model, about())
                if stopping:
                    log.info("Asked to stop: iteration %d is saved; resume with --resume.", done)
                    raise Stopped
            trainer.iter += 1
        finally:
            trainer.after_train()


def _is_due(cfg: CfgNode, done: int) -> bool:
    # The last iteration ends in exact BatchNorm statistics, which take long: a stop within them
    # resumes from the iteration before.
    last = cfg.SOLVER.MAX_ITER
    period = cfg.SOLVER.CHECKPOINT_PERIOD
    return (period > 0 and done % period == 0) or done in (last - 1, last)


def _until_stopped(batches: Iterable[Any], stop: StopRequest) -> Iterator[Any]:
    """Yield batches until any rank is asked to stop; all ranks take the same number of them."""
    for batch in batches:
        if any_rank(bool(stop)):
            raise Stopped
        yield batch


def _parallel(model: nn.Module) -> nn.Module:
    if comm.get_world_size() == 1:
        return model
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else None  # on a CPU there is no device to name
    with warnings.catch_warnings():
        # The argument that torch recommends instead would still send all buffers once.
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
        return DistributedDataParallel(model, device_ids=devices, broadcast_buffers=False)


def _share_buffers(model: nn.Module) -> None:
    """Give all ranks the BatchNorm statistics of rank 0: what is scored is what was saved."""
    if comm.get_world_size() == 1:
        return
    with torch.no_grad():
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
