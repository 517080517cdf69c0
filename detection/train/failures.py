"""Failures of a detector's training that a user can fix, explained in one message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from detectron2.config import CfgNode
from detectron2.utils import comm

from detection.errors import DetectionError
from kscl.runtime import failures


@contextlib.contextmanager
def explained(cfg: CfgNode) -> Iterator[None]:
    """Turn a NaN, full memory or a failure of the machine into an error with its fix."""
    try:
        with failures.explained(workers_key="DATALOADER.NUM_WORKERS"), _gpu_memory_explained(cfg):
            yield
    except FloatingPointError as error:
        raise DetectionError(
            f"{error}\nThe loss is not a number any more. Lower SOLVER.BASE_LR (now "
            f"{cfg.SOLVER.BASE_LR:g}) or raise SOLVER.WARMUP_ITERS (now "
            f"{cfg.SOLVER.WARMUP_ITERS}), and start in a new OUTPUT_DIR."
        ) from error


@contextlib.contextmanager
def _gpu_memory_explained(cfg: CfgNode) -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise DetectionError(
            f"The GPU's memory is full with {cfg.SOLVER.IMS_PER_BATCH // comm.get_world_size()} "
            f"images of up to {max(cfg.INPUT.MIN_SIZE_TRAIN)} pixels on it. Use more GPUs, or a "
            "smaller SOLVER.IMS_PER_BATCH with SOLVER.REFERENCE_WORLD_SIZE set, so that the "
            f"learning rate follows. ({error})"
        ) from error
