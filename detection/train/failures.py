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
def explained(cfg: CfgNode, scaled_from: int = 0) -> Iterator[None]:
    """Turn a NaN, full memory or a failure of the machine into an error with its fix.

    `scaled_from` is the number of processes that the config was scaled from, 0 if it was not.
    """
    of_memory = _gpu_memory_explained(cfg, scaled_from or cfg.SOLVER.REFERENCE_WORLD_SIZE)
    try:
        with failures.explained(workers_key="DATALOADER.NUM_WORKERS"), of_memory:
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
def _gpu_memory_explained(cfg: CfgNode, reference: int) -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        images = cfg.SOLVER.IMS_PER_BATCH // comm.get_world_size()
        count = "1 image" if images == 1 else f"{images} images"
        raise DetectionError(
            f"The GPU's memory is full with {count} of up to {max(cfg.INPUT.MIN_SIZE_TRAIN)} "
            f"pixels on it. {_with_fewer(images, reference)} ({error})"
        ) from error


def _with_fewer(images: int, reference: int) -> str:
    """Return how to train with fewer or smaller images on a GPU.

    A config for `reference` processes puts SOLVER.IMS_PER_BATCH / `reference` on each, however many
    processes there are.
    """
    if images == 1:
        return "Use smaller images (INPUT.MIN_SIZE_TRAIN, and _TEST to score)."
    if not reference:
        return (
            "Use more GPUs, or divide SOLVER.IMS_PER_BATCH and SOLVER.BASE_LR by the same number "
            "and multiply MAX_ITER, STEPS and WARMUP_ITERS by it."
        )
    by = 2 if images % 2 == 0 else images
    return (
        "Leave SOLVER.IMS_PER_BATCH as the config has it and set SOLVER.REFERENCE_WORLD_SIZE "
        f"{by * reference}: batch and learning rate are then divided by {by}, and the schedule is "
        f"{by} times as long."
    )
