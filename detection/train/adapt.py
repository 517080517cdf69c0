"""A protocol's config for this machine: its device, its number of processes, a fixed seed."""

from __future__ import annotations

import os

import torch
from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer

from detection.config import NORM_KEYS
from detection.errors import DetectionError
from kscl.config.tree import value_at


def adapt(cfg: CfgNode, num_gpus: int) -> tuple[CfgNode, int, str]:
    """Return the config to run, the number of processes it was scaled from (0: none), a notice."""
    cfg = cfg.clone()
    processes = int(os.environ.get("WORLD_SIZE", max(1, num_gpus)))
    if cfg.SEED < 0:  # Detectron2's "random" is the same order of images in every trial
        cfg.SEED = 0
    if not torch.cuda.is_available():
        _adapt_to_cpu(cfg, processes)
    if len(cfg.DATASETS.TEST) != 1:
        raise DetectionError(
            f"DATASETS.TEST is {tuple(cfg.DATASETS.TEST)}. Name one set: a record has one result."
        )
    return _scale(cfg, processes)


def _adapt_to_cpu(cfg: CfgNode, processes: int) -> None:
    cfg.MODEL.DEVICE = "cpu"
    if cfg.SOLVER.AMP.ENABLED:
        raise DetectionError("SOLVER.AMP.ENABLED needs a GPU and there is none. Set it to False.")
    needing_gpus = [key for key in NORM_KEYS if value_at(cfg, key) in ("SyncBN", "nnSyncBN")]
    if processes > 1 and needing_gpus:
        raise DetectionError(
            f"{' and '.join(needing_gpus)} {value_at(cfg, needing_gpus[0])} needs GPUs and there "
            "is none. Set it to naiveSyncBN, which computes the same on any device."
        )


def _scale(cfg: CfgNode, processes: int) -> tuple[CfgNode, int, str]:
    """Scale batch, learning rate and schedule to the number of processes, as Detectron2 does."""
    reference = cfg.SOLVER.REFERENCE_WORLD_SIZE
    if reference in (0, processes):
        return cfg, 0, ""
    if cfg.SOLVER.IMS_PER_BATCH % reference:
        raise DetectionError(
            f"SOLVER.IMS_PER_BATCH is {cfg.SOLVER.IMS_PER_BATCH}, which the {reference} processes "
            "of the protocol cannot share, so it cannot be scaled. Set SOLVER.REFERENCE_WORLD_SIZE "
            "0 to use batch, learning rate and iterations as they are."
        )
    scaled = DefaultTrainer.auto_scale_workers(cfg, processes)
    factor = processes / reference
    scaled.defrost()
    scaled.KSCL.LR_GRID = [rate * factor for rate in cfg.KSCL.LR_GRID]
    # Detectron2 scales it too, but an iteration takes as long as before, and so does a period.
    scaled.SOLVER.CHECKPOINT_PERIOD = cfg.SOLVER.CHECKPOINT_PERIOD
    notice = (
        f"Written for {reference} processes, running on {processes}: batch "
        f"{cfg.SOLVER.IMS_PER_BATCH} → {scaled.SOLVER.IMS_PER_BATCH}, learning rate "
        f"{cfg.SOLVER.BASE_LR:g} → {scaled.SOLVER.BASE_LR:g}, iterations "
        f"{cfg.SOLVER.MAX_ITER} → {scaled.SOLVER.MAX_ITER}, steps {scaled.SOLVER.STEPS}, "
        f"warm-up {scaled.SOLVER.WARMUP_ITERS}. The record says so and the protocol's hash is "
        f"another: BatchNorm sees {'fewer' if processes < reference else 'more'} images at once, "
        "which no scaling fixes. SOLVER.REFERENCE_WORLD_SIZE 0 uses the numbers as they are.\n"
    )
    return scaled, reference, notice
