"""Fine-tuning a detector: Detectron2's own loop, made to resume to the same numbers."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.engine import AMPTrainer, HookBase, SimpleTrainer, hooks
from detectron2.engine.defaults import default_writers
from detectron2.modeling import build_model
from detectron2.solver import build_lr_scheduler, build_optimizer
from detectron2.utils import comm
from fvcore.nn.precise_bn import get_bn_modules
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from detection.convert.certificate import Certificate
from detection.convert.weights import load_weights
from detection.errors import DetectionError
from detection.train.checkpoint import AtomicCheckpointer, Stopwatch, forget_metrics_after
from detection.train.loader import build_train_loader, seed_everything

LINES_EVERY = 20  # iterations


class _SeedEachStep(HookBase):
    """What is drawn in a step (proposals, RoIs) follows from its number, also after a restart."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def before_step(self) -> None:
        seed_everything(self.seed, "step", self.trainer.iter, comm.get_rank())


def train(
    cfg: CfgNode, certificate: Certificate | None, stopwatch: Stopwatch, resume: bool
) -> nn.Module:
    """The fine-tuned model, from converted weights or, with `resume`, from the last checkpoint."""
    seed_everything(cfg.SEED, "model")  # the same new layers on every rank and in every restart
    model = build_model(cfg)
    parallel = _parallel(model)
    optimizer = build_optimizer(cfg, model)
    trainer_type = AMPTrainer if cfg.SOLVER.AMP.ENABLED else SimpleTrainer
    trainer = trainer_type(parallel, None, optimizer)
    scheduler = build_lr_scheduler(cfg, optimizer)
    checkpointer = AtomicCheckpointer(
        model,
        cfg.OUTPUT_DIR,
        save_to_disk=comm.is_main_process(),
        trainer=trainer,
        stopwatch=stopwatch,
    )
    trainer.register_hooks(_hooks(cfg, parallel, optimizer, scheduler, checkpointer))
    resume = resume and checkpointer.has_checkpoint()
    if resume:
        checkpointer.resume_or_load("", resume=True)
    elif certificate is not None:
        load_weights(model, cfg.MODEL.WEIGHTS)
    start = trainer.iter + 1 if resume else 0
    if comm.is_main_process():
        forget_metrics_after(Path(cfg.OUTPUT_DIR), start - 1)
        writers = default_writers(cfg.OUTPUT_DIR, cfg.SOLVER.MAX_ITER)
        trainer.register_hooks([hooks.PeriodicWriter(writers, period=LINES_EVERY)])
    trainer.data_loader = build_train_loader(cfg, cfg.SEED, start)
    logging.getLogger("detectron2").info(f"training from iteration {start}")
    _run(trainer, start, cfg)
    return model


def _run(trainer: SimpleTrainer, start: int, cfg: CfgNode) -> None:
    if start >= cfg.SOLVER.MAX_ITER:
        return
    try:
        trainer.train(start, cfg.SOLVER.MAX_ITER)
    except FloatingPointError as error:
        raise DetectionError(
            f"{error}\nThe loss is no number any more: lower SOLVER.BASE_LR (now "
            f"{cfg.SOLVER.BASE_LR:g}) or lengthen SOLVER.WARMUP_ITERS (now "
            f"{cfg.SOLVER.WARMUP_ITERS}), and start in a new OUTPUT_DIR."
        ) from error
    except torch.cuda.OutOfMemoryError as error:
        raise DetectionError(
            f"the GPU's memory is full with {cfg.SOLVER.IMS_PER_BATCH // comm.get_world_size()} "
            f"images of up to {max(cfg.INPUT.MIN_SIZE_TRAIN)} pixels on it. Use more GPUs, or a "
            "smaller SOLVER.IMS_PER_BATCH, with SOLVER.REFERENCE_WORLD_SIZE set so that the "
            f"learning rate follows. ({error})"
        ) from error


def _parallel(model: nn.Module) -> nn.Module:
    if comm.get_world_size() == 1:
        return model
    on_gpu = next(model.parameters()).is_cuda
    devices = [comm.get_local_rank()] if on_gpu else None  # on a CPU there is no device to name
    return DistributedDataParallel(model, device_ids=devices, broadcast_buffers=False)


def _hooks(
    cfg: CfgNode,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    checkpointer: AtomicCheckpointer,
) -> list[HookBase]:
    """In Detectron2's order: exact BatchNorm statistics before the last checkpoint holds them."""
    found: list[HookBase] = [
        _SeedEachStep(cfg.SEED),
        hooks.IterationTimer(),
        hooks.LRScheduler(optimizer, scheduler),
    ]
    if cfg.TEST.PRECISE_BN.ENABLED and get_bn_modules(model):
        quiet = cfg.clone()
        quiet.defrost()
        quiet.DATALOADER.NUM_WORKERS = 0
        loader = build_train_loader(quiet, cfg.SEED + 1)  # another order than the training's
        found.append(hooks.PreciseBN(0, model, loader, cfg.TEST.PRECISE_BN.NUM_ITER))
    if comm.is_main_process():
        found.append(hooks.PeriodicCheckpointer(checkpointer, cfg.SOLVER.CHECKPOINT_PERIOD))
    return found
