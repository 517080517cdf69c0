"""What a run will do, logged before it starts."""

from __future__ import annotations

import logging
from typing import Any

from fvcore.common.config import CfgNode

from kscl.engine.health import batch_norm_warnings, queue_warnings
from kscl.engine.schedule import learning_rate
from kscl.engine.state import TrainState
from kscl.methods.cost import PASSES_OF_MOCO, forward_passes, num_views, views_in_words
from kscl.registry import SIMILARITIES
from kscl.runtime.distributed import world_size
from kscl.runtime.precision import tell_of_tf32

log = logging.getLogger(__name__)


def derived_values(cfg: CfgNode) -> list[str]:
    """Return what follows from the settings, one line each, to check before a long run."""
    batch, shots = cfg.SOLVER.BATCH_SIZE, cfg.METHOD.NUM_SHOTS
    rate = f"learning rate {learning_rate(cfg):g}"
    if not cfg.SOLVER.SCALE_LR:
        lines = [f"batch {batch} → {rate}, not scaled (SOLVER.SCALE_LR False)"]
    elif batch == cfg.SOLVER.REFERENCE_BATCH_SIZE:
        lines = [f"batch {batch} → {rate}, as given"]
    else:
        lines = [f"batch {batch} → {rate} by linear scaling (SOLVER.SCALE_LR False to disable)"]
    lines.append(
        f"{views_in_words(cfg)} → {num_views(cfg)} views per image; a step costs about "
        f"{forward_passes(cfg) / PASSES_OF_MOCO:.2f} times that of MoCo"
    )
    if cfg.DICTIONARY.TYPE == "queue":
        length, dim = cfg.DICTIONARY.QUEUE_LENGTH, cfg.PROJECTOR.DIM
        stored = SIMILARITIES[cfg.METHOD.SIMILARITY].max_rank(shots, cfg.METHOD.RHO)
        lines.append(
            f"queue of {length:,} subspaces x {stored} x {dim} → "
            f"{length * stored * dim * 4 / 2**20:.1f} MiB"
        )
    return lines


def announce(state: TrainState, data: dict[str, Any]) -> None:
    """Log what the run will do."""
    for line in derived_values(state.cfg):
        log.info(line)
    log.info(
        "%s images, fingerprint %s; %d steps per epoch, %d in all; on %s",
        f"{data['images']:,}",
        data["hash"],
        state.steps_per_epoch,
        state.total_steps,
        f"{world_size()} x {state.device.type}",
    )
    tell_of_tf32(state.cfg.SOLVER.AMP, state.cfg.SOLVER.TF32, state.device)
    for warning in (
        *queue_warnings(state.cfg, data["images"]),
        *batch_norm_warnings(state.cfg, state.learner, world_size()),
    ):
        log.warning("%s", warning)
