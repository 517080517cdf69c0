"""Failures of a detector's training that a user can fix, explained in one message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from detectron2.config import CfgNode
from detectron2.utils import comm

from detection.config import NORM_KEYS
from detection.errors import DetectionError
from kscl.config.tree import value_at
from kscl.runtime import failures


@contextlib.contextmanager
def explained(cfg: CfgNode) -> Iterator[None]:
    """Turn a NaN, full memory or a failure of the machine into an error with its fix."""
    try:
        with failures.explained(workers_key="DATALOADER.NUM_WORKERS"), _gpu_memory_explained(cfg):
            yield
    except FloatingPointError as error:
        raise DetectionError(
            f"{error}\nThe training computes what is not a number. {_of_naive_norms(cfg)}Lower "
            f"SOLVER.BASE_LR (now {cfg.SOLVER.BASE_LR:g}) or raise SOLVER.WARMUP_ITERS (now "
            f"{cfg.SOLVER.WARMUP_ITERS}), and start in a new OUTPUT_DIR."
        ) from error


def _of_naive_norms(cfg: CfgNode) -> str:
    """Return what to do about Detectron2's norm whose variance may be negative, if it is used."""
    naive = [key for key in NORM_KEYS if value_at(cfg, key).startswith("naiveSyncBN")]
    if not naive or comm.get_world_size() == 1:  # on one process it is a plain BatchNorm
        return ""
    return (
        f"{' and '.join(naive)} is {value_at(cfg, naive[0])}, whose variance over several "
        "processes (mean of squares less square of mean) is rounded below 0 where a channel hardly "
        "varies, as in few or small images: use larger images (INPUT.MIN_SIZE_TRAIN), more of them "
        "per process (SOLVER.IMS_PER_BATCH), or another norm (SyncBN on GPUs, BN elsewhere). If "
        "it is not that: "
    )


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
