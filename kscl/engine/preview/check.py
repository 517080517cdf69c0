"""Look for all that would stop a pretraining, without starting it or writing anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from fvcore.common.config import CfgNode

from kscl.cli import is_later
from kscl.data.annotations import SHOWN_PER_KIND, Problem
from kscl.data.bad_images import BadImages, check_some_image_reads, find_unreadable
from kscl.data.formats import DECODED_SAMPLE
from kscl.data.loader import steps_per_epoch
from kscl.data.open import open_source
from kscl.data.source import ImageSource, is_remote
from kscl.data.tar import check_reachable, is_shard_pattern
from kscl.engine.health import batch_norm_warnings, queue_warnings
from kscl.engine.knn import KnnCheck
from kscl.engine.pretrain import start_from_weights
from kscl.engine.state import build_state, check_ranks, check_room
from kscl.errors import KsclError
from kscl.runtime.files import existing_parent


def check_pretraining(cfg: CfgNode, num_gpus: int, later: Sequence[str]) -> list[Problem]:
    """Return the problems of data, network, weights and disk."""
    return list(_problems(cfg, num_gpus, later))


def _problems(cfg: CfgNode, num_gpus: int, later: Sequence[str]) -> Iterator[Problem]:
    num_images = cfg.SOLVER.BATCH_SIZE  # if the images are not there yet
    try:
        check_ranks(cfg, max(1, num_gpus))
    except KsclError as error:
        yield Problem("batch", "SOLVER.BATCH_SIZE", str(error), "")
    where = cfg.DATA.TRAIN
    if is_remote(where) and is_shard_pattern(where):  # to count its images is to download it
        try:
            check_reachable(where)
        except KsclError as error:
            yield Problem("data", "DATA.TRAIN", str(error), "")
    elif not is_later(where, later):
        try:
            source = open_source(where, cfg.DATA.CACHE_DIR)
            num_images = len(source)
            for doubt in queue_warnings(cfg, num_images):
                yield Problem("queue", "DICTIONARY.QUEUE_LENGTH", doubt, "", fatal=False)
            check_some_image_reads(source, cfg.SEED, cfg.DATA.MAX_PIXELS)
            yield from _unreadable(source, cfg)
        except KsclError as error:
            yield Problem("data", "DATA.TRAIN", str(error), "")
    if cfg.EVAL.KNN_PERIOD and not any(
        is_later(name, later) for name in (cfg.EVAL.KNN_TRAIN, cfg.EVAL.KNN_VAL)
    ):
        try:
            knn = KnnCheck(cfg)
            for labeled in (knn.train, knn.val):
                check_some_image_reads(labeled, cfg.SEED, cfg.DATA.MAX_PIXELS)
        except KsclError as error:
            yield Problem("data", "EVAL.KNN_TRAIN and EVAL.KNN_VAL", str(error), "")
    try:
        steps = steps_per_epoch(num_images, cfg.SOLVER.BATCH_SIZE)
        state = build_state(cfg, num_images, steps, torch.device("cpu"))
        for doubt in batch_norm_warnings(cfg, state.learner, max(1, num_gpus)):
            yield Problem("batch norm", "KEY_ENCODER.BATCH_NORM_GROUPS", doubt, "", fatal=False)
        start_from_weights(state.learner, cfg)
        check_room(state, existing_parent(Path(cfg.OUTPUT_DIR)))
    except KsclError as error:
        yield Problem("pretraining", "the config", str(error), "")


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
