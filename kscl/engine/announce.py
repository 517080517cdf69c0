"""What a run will do, told before it starts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from kscl.engine.schedule import learning_rate
from kscl.engine.state import Training
from kscl.method.cost import PASSES_OF_MOCO, forward_passes
from kscl.method.similarity import find_similarity
from kscl.runtime.distributed import world_size

log = logging.getLogger(__name__)


def derived_values(cfg: CfgNode) -> list[str]:
    """What follows from the settings, one line each, for a person to check before a long run."""
    batch, shots = cfg.SOLVER.BATCH_SIZE, cfg.METHOD.NUM_SHOTS
    rate = f"learning rate {learning_rate(cfg):g}"
    if not cfg.SOLVER.SCALE_LR:
        lines = [f"batch {batch} → {rate}, not scaled (SOLVER.SCALE_LR False)"]
    elif batch == cfg.SOLVER.REFERENCE_BATCH_SIZE:
        lines = [f"batch {batch} → {rate}, as given"]
    else:
        lines = [f"batch {batch} → {rate} by linear scaling (SOLVER.SCALE_LR False to switch off)"]
    lines.append(
        f"K = {shots} → {shots + 1} views an image; a step costs about "
        f"{forward_passes(cfg) / PASSES_OF_MOCO:.2f} times that of MoCo"
    )
    if cfg.DICTIONARY.TYPE == "queue":
        length, dim = cfg.DICTIONARY.QUEUE_LENGTH, cfg.PROJECTOR.DIM
        stored = find_similarity(cfg.METHOD.SIMILARITY).max_rank(shots, cfg.METHOD.RHO)
        lines.append(
            f"queue of {length:,} subspaces x {stored} x {dim} → "
            f"{length * stored * dim * 4 / 2**20:.1f} MiB"
        )
    return lines


def announce(training: Training, data: dict[str, Any], checkpoint: Path | None) -> None:
    """What will be done, for a person to check before a long run."""
    cfg = training.cfg
    for line in derived_values(cfg):
        log.info(line)
    log.info(
        "%s images, fingerprint %s; %d steps an epoch, %d in all; on %s",
        f"{data['images']:,}",
        data["hash"],
        training.steps_per_epoch,
        training.total_steps,
        f"{world_size()} x {training.device.type}",
    )
    if checkpoint is not None:
        log.info("going on after step %d from %s", training.step, checkpoint)
