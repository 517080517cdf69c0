"""Estimate how long a pretraining takes here: decode, augment and encode a few images."""

from __future__ import annotations

import math
from dataclasses import replace

from fvcore.common.config import CfgNode

from kscl.data.loader import Budget, build_train_loader, measure_budget, steps_per_epoch
from kscl.data.source import ImageSource
from kscl.engine.loop import warm_up
from kscl.engine.schedule import total_steps
from kscl.engine.state import build_state
from kscl.methods.cost import forward_passes
from kscl.runtime.distributed import device
from kscl.runtime.machine import usable_cores
from kscl.views.sizes import mean_pixels, size_at

MOST_IMAGES = 16  # in a measured step; a whole batch could take minutes on a CPU


def budget_here(cfg: CfgNode, source: ImageSource) -> Budget:
    """Return the images per second of every stage, measured on this process's device."""
    small = cfg.clone()
    small.defrost()
    batch = cfg.SOLVER.BATCH_SIZE
    small.SOLVER.BATCH_SIZE = max(
        n for n in range(1, min(batch, MOST_IMAGES) + 1) if batch % n == 0
    )
    small.SOLVER.GRAD_ACCUM_STEPS = 1
    small.DATA.NUM_WORKERS = 0  # only its data set is used
    steps = steps_per_epoch(len(source), small.SOLVER.BATCH_SIZE)
    # As many epochs: warm-up and milestones are judged by them.
    more = steps / steps_per_epoch(len(source), batch)
    small.SOLVER.MAX_STEPS = math.ceil(cfg.SOLVER.MAX_STEPS * more)
    small.freeze()
    state = build_state(small, len(source), steps, device())
    loader = build_train_loader(small, source, first_step=0, last_step=steps, rank=0, world_size=1)
    budget = measure_budget(loader.dataset, cfg.DATA.NUM_WORKERS)
    return over_all_sizes(budget.with_encode(warm_up(state)), cfg)


def over_all_sizes(budget: Budget, cfg: CfgNode) -> Budget:
    """Return the mean rates of a training from those measured at its first size."""
    assert budget.encode is not None
    first = size_at(cfg.INPUT.SIZE, 0) ** 2
    mean = mean_pixels(cfg.INPUT.SIZE, cfg.SOLVER.EPOCHS)
    more_to_encode = forward_passes(cfg) / forward_passes(cfg, first)
    return replace(
        budget,
        augment=budget.augment * first / mean,
        encode=budget.encode / more_to_encode,
    )


def seconds_of(cfg: CfgNode, num_images: int, budget: Budget) -> float:
    """Return the seconds of all steps, without evaluations and checkpoints."""
    assert budget.encode is not None
    if cfg.DATA.NUM_WORKERS and usable_cores() > 1:  # they load while the encoder computes
        rate = min(budget.load, budget.encode)
    else:
        rate = 1 / (1 / budget.load + 1 / budget.encode)
    steps = total_steps(cfg, steps_per_epoch(num_images, cfg.SOLVER.BATCH_SIZE))
    return steps * cfg.SOLVER.BATCH_SIZE / rate
