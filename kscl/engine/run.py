"""One rank's part of a pretraining run, from the claim of its folder to the record."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from fvcore.common.config import CfgNode

from kscl.backbone_file import DESCRIPTION_VERSION, read_plain
from kscl.config.tree import config_values, save_config
from kscl.data.bad_images import BadImages
from kscl.data.loader import TrainLoader, build_train_loader, steps_per_epoch
from kscl.data.open import ImageSource, open_source
from kscl.data.throughput import measure_budget
from kscl.engine.announce import announce
from kscl.engine.checkpoint import CHECKPOINT_FOLDER
from kscl.engine.export import KNN_TOP1, describe, finish
from kscl.engine.knn import KnnCheck
from kscl.engine.loop import settle, train
from kscl.engine.metrics_log import RunLog
from kscl.engine.run_dir import find_start, only_run_in
from kscl.engine.start import start_from_weights
from kscl.engine.state import Training, build_training, restore
from kscl.errors import KsclError
from kscl.records.fingerprint import fingerprint
from kscl.records.record import RECORD_FILE
from kscl.runtime.cpu import avoid_broken_amx, keep_freed_memory
from kscl.runtime.distributed import rank, world_size
from kscl.runtime.launch import device, on_first_rank
from kscl.runtime.logs import set_up_logging
from kscl.runtime.signals import StopRequest, stop_requests

log = logging.getLogger(__name__)

SAMPLED_IMAGES = 64


@dataclass(frozen=True)
class Job:
    """What every rank is told."""

    cfg: CfgNode
    resume: bool
    auto_resume: bool


def run(job: Job) -> int:
    """One rank's part, from the folder's claim to the record."""
    cfg, folder = job.cfg, Path(job.cfg.OUTPUT_DIR)
    set_up_logging(rank=rank())
    if device().type == "cpu":
        keep_freed_memory()
        if cfg.SOLVER.AMP == "bf16":
            avoid_broken_amx()
    with contextlib.ExitStack() as until_the_end:

        def claim() -> Path | None:
            until_the_end.enter_context(only_run_in(folder))
            return find_start(cfg, job.resume, job.auto_resume)

        checkpoint = on_first_rank(claim)
        if (folder / RECORD_FILE).exists():
            log.info("this run has ended: %s", folder / RECORD_FILE)
            return 0
        source = open_in_turn(cfg)
        data = on_first_rank(lambda: data_fingerprint(cfg.DATA.TRAIN, source))
        steps = steps_per_epoch(len(source), cfg.SOLVER.BATCH_SIZE)
        training = build_training(cfg, len(source), steps, device())
        saved = read_plain(checkpoint) if checkpoint is not None else None
        if saved is not None:
            refuse_other_data(saved["data"], data, cfg.DATA.TRAIN)
            restore(training, saved)
        else:
            training.inputs = start_from_weights(training.learner, cfg)
        loader = build_train_loader(
            cfg,
            first_step=training.step,
            last_step=training.total_steps,
            rank=rank(),
            world_size=world_size(),
        )
        loader.bad_images.reasons.update(saved["bad_images"] if saved is not None else {})
        knn = KnnCheck(cfg) if cfg.EVAL.KNN_PERIOD else None
        # Nothing is left to refuse. The config is written first: it tells whose folder this is.
        on_first_rank(lambda: save_config(cfg, folder))
        set_up_logging(folder, rank())
        announce(training, data, checkpoint)
        with stop_requests() as stop:
            if not go_on(training, loader, knn, data, stop):
                return stop.exit_code
        bad_images = all_reasons(loader.bad_images)
        on_first_rank(lambda: finish(training, data, bad_images, folder))
    return 0


def open_in_turn(cfg: CfgNode) -> ImageSource:
    """Rank 0 first: the index of files that it leaves is then there for the others."""
    opened: list[ImageSource] = []
    on_first_rank(lambda: opened.append(open_source(cfg.DATA.TRAIN, cfg.DATA.CACHE_DIR)))
    return opened[0] if opened else open_source(cfg.DATA.TRAIN, cfg.DATA.CACHE_DIR)


def go_on(
    training: Training,
    loader: TrainLoader,
    knn: KnnCheck | None,
    data: dict[str, Any],
    stop: StopRequest,
) -> bool:
    """Train to the end, or until asked to stop; whether the end was reached."""
    cfg, folder = training.cfg, Path(training.cfg.OUTPUT_DIR)
    if training.step == training.total_steps:
        return True
    budget = measure_budget(loader.dataset, cfg.DATA.NUM_WORKERS).with_encode(settle(training))
    log.info("a process: %s", budget)

    def about() -> dict[str, Any]:
        return {
            "description": {"version": DESCRIPTION_VERSION, **asdict(describe(training, data))},
            "config": config_values(cfg),
            "data": data,
            "bad_images": all_reasons(loader.bad_images),
        }

    def check(epoch: int) -> dict[str, float]:
        if knn is None or (epoch % cfg.EVAL.KNN_PERIOD and epoch != cfg.SOLVER.EPOCHS):
            return {}
        top1 = knn.accuracy(training.learner.encoder.backbone, training.device)
        log.info("epoch %d: kNN %.2f %%", epoch, top1)
        return {KNN_TOP1: top1}

    run_log = RunLog(
        folder if rank() == 0 else None,
        training.step,
        training.total_steps,
        training.steps_per_epoch,
        cfg.METHOD.NUM_SHOTS + 1,
    )
    with run_log:
        return train(training, loader, folder / CHECKPOINT_FOLDER, run_log, stop, about, check)


def data_fingerprint(where: str, source: ImageSource) -> dict[str, Any]:
    """Of names, sizes and a sample of the contents; without sizes where the data is not a file."""
    if Path(where).exists():
        return {**fingerprint(where).as_dict(), "images": len(source)}
    digest = hashlib.sha256()
    for index in range(len(source)):
        digest.update(f"{source.name(index)}\0".encode("utf-8", "surrogateescape"))
    for index in range(0, len(source), max(1, len(source) // SAMPLED_IMAGES)):
        digest.update(source.read(index))
    return {"hash": digest.hexdigest()[:16], "images": len(source)}


def refuse_other_data(before: dict[str, Any], now: dict[str, Any], where: str) -> None:
    if before["hash"] != now["hash"]:
        raise KsclError(
            f"DATA.TRAIN {where} has changed since the checkpoint was written (fingerprint "
            f"{before['hash']} with {before['images']:,} images then, {now['hash']} with "
            f"{now['images']:,} now): bring the images back, or start a new run"
        )


def all_reasons(bad_images: BadImages) -> dict[int, str]:
    """The ranks' accounts of bad images in one."""
    if world_size() == 1:
        return dict(bad_images.reasons)
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, bad_images.reasons)
    return {index: reason for part in parts for index, reason in part.items()}
