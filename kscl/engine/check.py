"""Check a pretraining without starting it: its problems, and how long it would take."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from fvcore.common.config import CfgNode

from kscl.cli import is_later
from kscl.data.annotations import SHOWN_PER_KIND, Problem
from kscl.data.bad_images import BadImages, check_some_image_reads, find_unreadable
from kscl.data.formats import DECODED_SAMPLE
from kscl.data.loader import Budget, build_train_loader, measure_budget, steps_per_epoch
from kscl.data.open import open_source
from kscl.data.source import ImageSource, is_remote
from kscl.data.tar import check_reachable, is_shard_pattern
from kscl.engine.cost import forward_passes
from kscl.engine.knn import KnnCheck
from kscl.engine.loop import build_state, check_ranks, warm_up
from kscl.engine.pretrain import check_room, start_from_weights
from kscl.engine.schedule import total_steps
from kscl.errors import KsclError
from kscl.runtime.distributed import device
from kscl.runtime.files import existing_parent
from kscl.runtime.machine import usable_cores
from kscl.views.sizes import mean_pixels, size_at

MOST_IMAGES = 16  # in a measured step; a whole batch could take minutes on a CPU


def check_pretraining(cfg: CfgNode, num_gpus: int, later: Sequence[str]) -> list[Problem]:
    """Return the problems of data, network, weights and disk."""
    found: list[Problem] = []

    @contextlib.contextmanager
    def noted(kind: str, where: str) -> Iterator[None]:
        try:
            yield
        except KsclError as error:
            found.append(Problem(kind, where, str(error), ""))

    num_images = None  # the images may not exist yet
    with noted("batch", "SOLVER.BATCH_SIZE"):
        check_ranks(cfg, max(1, num_gpus))
    where = cfg.DATA.TRAIN
    with noted("data", "DATA.TRAIN"):
        if is_remote(where) and is_shard_pattern(where):  # counting its images would download it
            check_reachable(where)
        elif not is_later(where, later):
            source = open_source(where, cfg.DATA.CACHE_DIR)
            num_images = len(source)
            check_some_image_reads(source, cfg.SEED, cfg.DATA.MAX_PIXELS)
            found.extend(_unreadable(source, cfg))
    later_too = any(is_later(name, later) for name in (cfg.EVAL.KNN_TRAIN, cfg.EVAL.KNN_VAL))
    with noted("data", "EVAL.KNN_TRAIN and EVAL.KNN_VAL"):
        if cfg.EVAL.KNN_PERIOD and not later_too:
            knn = KnnCheck(cfg)
            for labeled in (knn.train, knn.val):
                check_some_image_reads(labeled, cfg.SEED, cfg.DATA.MAX_PIXELS)
    with noted("pretraining", "the config"):
        count = cfg.SOLVER.BATCH_SIZE if num_images is None else num_images
        steps = steps_per_epoch(count, cfg.SOLVER.BATCH_SIZE)
        state = build_state(cfg, count, steps, torch.device("cpu"))
        for key, warning in state.method.setup_warnings(num_images, max(1, num_gpus)):
            found.append(Problem("method", key, warning, "", fatal=False))
        start_from_weights(state.method, cfg)
        check_room(state, existing_parent(Path(cfg.OUTPUT_DIR)))
    return found


def _unreadable(source: ImageSource, cfg: CfgNode) -> Iterator[Problem]:
    """Decode all images, or a fixed sample of many, and judge by the rule of the training."""
    rule = BadImages(source, cfg.DATA.BAD_IMAGES, cfg.DATA.MAX_BAD_FRACTION)
    num_decoded, reasons, notes = find_unreadable(
        source, range(len(source)), DECODED_SAMPLE, cfg.DATA.MAX_PIXELS
    )
    yield from notes
    if not reasons:
        return
    names = [f"{source.name(index)} ({reason})" for index, reason in reasons.items()]
    more = f" and {len(names) - SHOWN_PER_KIND} more" if len(names) > SHOWN_PER_KIND else ""
    what = (
        f"{len(reasons)} of the {num_decoded:,} images that were decoded cannot be read: "
        f"{', '.join(names[:SHOWN_PER_KIND])}{more}"
    )
    stops = rule.would_stop(len(reasons), num_decoded)
    fix = "They are skipped in training"
    if stops and cfg.DATA.BAD_IMAGES == "error":
        fix = "Fix or remove them, or set DATA.BAD_IMAGES to skip"
    elif stops:
        allowed = f"DATA.MAX_BAD_FRACTION = {cfg.DATA.MAX_BAD_FRACTION:g}"
        fix = f"This is more than {allowed} allows: fix or remove them, or allow more"
    yield Problem("unreadable image", "DATA.TRAIN", what, fix, fatal=stops)


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
