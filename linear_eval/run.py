"""Run an evaluation: a backbone and two folders of images in, a record out."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from kscl.config.tree import CONFIG_FILE, config_values, save_config
from kscl.engine.run_dir import find_start, only_run_in
from kscl.records.record import RECORD_FILE, Protocol, RecordError, read_record, write_record
from kscl.runtime.cpu import avoid_broken_amx
from kscl.runtime.distributed import rank, world_size
from kscl.runtime.launch import device, on_first_rank
from kscl.runtime.logs import LOGGER, set_up_logging
from kscl.runtime.precision import set_numerics, warn_of_emulation
from kscl.runtime.signals import StopRequest, stop_requests
from linear_eval.backbone import Frozen, freeze
from linear_eval.checkpoint import Saver, Stopped, saved_state
from linear_eval.config import CENTER, WITHOUT_EFFECT_ON_RESULTS
from linear_eval.data.features import Features, cached_features
from linear_eval.data.images import LabeledImages, open_data
from linear_eval.data.views import cached_views, geometry
from linear_eval.errors import LinearEvalError
from linear_eval.probes.cached import probe_cached
from linear_eval.probes.knn import probe_knn
from linear_eval.probes.online import probe_online
from linear_eval.probes.outcome import Outcome
from linear_eval.protocols import IMAGENET_LINEAR_MOCO, deviations, protocol_of
from linear_eval.record import in_words, record_of, sizes_of, summary, write_classifier

log = logging.getLogger(LOGGER)

Json = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What every rank needs to know of one evaluation."""

    cfg: CfgNode
    resume: bool = False
    auto_resume: bool = False


def jobs_of(cfg: CfgNode, num_seeds: int, resume: bool, auto_resume: bool) -> list[Job]:
    """Return one evaluation, or one per seed in folders seed0, seed1, … if `num_seeds` is not 0."""
    if num_seeds < 0:
        raise LinearEvalError(f"--num-seeds is {num_seeds}. It must be at least 1.")
    configs = [with_seed(cfg, cfg.SEED + n) for n in range(num_seeds)] or [cfg]
    return [Job(each, resume, auto_resume) for each in configs]


def with_seed(cfg: CfgNode, seed: int) -> CfgNode:
    """Return the same evaluation with another seed, in a folder of its own."""
    other = cfg.clone()
    other.defrost()
    other.SEED = seed
    other.OUTPUT_DIR = str(Path(cfg.OUTPUT_DIR) / f"seed{seed}")
    other.freeze()
    return other


def run_all(jobs: Sequence[Job]) -> int:
    """Do one rank's part of several evaluations, one after another; return the exit code."""
    for job in jobs:
        if code := run(job):
            return code
    if rank() == 0:
        print(summary([Path(job.cfg.OUTPUT_DIR) for job in jobs]), flush=True)
    return 0


def run(job: Job) -> int:
    """Do one rank's part of one evaluation, from claiming its folder to its record."""
    cfg, folder = job.cfg, Path(job.cfg.OUTPUT_DIR)
    set_up_logging(rank=rank())
    set_numerics(tf32=cfg.SOLVER.TF32)
    warn_of_emulation(cfg.SOLVER.AMP, device())
    if cfg.SOLVER.AMP == "bf16" and device().type == "cpu":
        avoid_broken_amx()
    with contextlib.ExitStack() as until_the_end, stop_requests() as stop:

        def claim() -> bool:
            until_the_end.enter_context(only_run_in(folder))
            check_folder(job)
            return has_record(folder)

        has_ended = on_first_rank(claim)
        set_up_logging(folder, rank())
        if has_ended:
            log.info("This evaluation has ended: %s.", folder / RECORD_FILE)
            return 0
        on_first_rank(lambda: save_config(cfg, folder))
        try:
            evaluate(cfg, folder, stop)
        except Stopped as stopped:
            log.info("%s", stopped)
            return stopped.exit_code
    return 0


def check_folder(job: Job) -> None:
    """Raise an error unless the folder is empty, or is that of this run and it may resume."""
    folder = Path(job.cfg.OUTPUT_DIR)
    if job.resume and not (folder / CONFIG_FILE).exists():
        raise LinearEvalError(
            f"There is nothing to resume in {folder}. --auto-resume starts a run if there is none."
        )
    # Most of a probe's state is its cached features, so a run without a checkpoint resumes too.
    find_start(job.cfg, False, job.resume or job.auto_resume, WITHOUT_EFFECT_ON_RESULTS)


def has_record(folder: Path) -> bool:
    """Tell whether the evaluation has ended; raise an error if its record cannot be read."""
    path = folder / RECORD_FILE
    if not os.path.lexists(path):
        return False
    try:
        read_record(path)
    except RecordError as error:
        raise LinearEvalError(
            f"{error} Delete it to evaluate again, or choose another OUTPUT_DIR."
        ) from error
    return True


def evaluate(cfg: CfgNode, folder: Path, stop: StopRequest) -> None:
    """Probe the backbone, resuming what was saved, and write the record."""
    began = time.monotonic()
    train, val = open_data(cfg)
    protocol = protocol_of(cfg, sizes_of(train, val))
    if rank() == 0:
        announce(cfg, protocol, train, val)
    frozen = freeze(cfg, train)
    about = {
        "config": config_values(cfg),
        "backbone": frozen.loaded.tensors_sha256,
        "data": {"train": train.fingerprint["hash"], "val": val.fingerprint["hash"]},
    }
    saved = on_first_rank(lambda: saved_state(folder, about))
    before = saved["seconds"] if saved else 0.0

    def seconds() -> float:
        return before + time.monotonic() - began

    saver = Saver(folder, about, cfg.CHECKPOINT.SECONDS, stop, seconds)
    outcome = probe(cfg, frozen, train, val, saver, saved)
    frozen.check_unchanged()
    if outcome is not None:
        record = record_of(cfg, protocol, frozen, train, val, outcome, seconds())
        write_classifier(outcome, val, folder)
        path = write_record(record, folder)
        log.info("%s", in_words(record, outcome.remark))
        log.info("Written: %s.", path)


def probe(
    cfg: CfgNode,
    frozen: Frozen,
    train: LabeledImages,
    val: LabeledImages,
    saver: Saver,
    saved: Json | None,
) -> Outcome | None:
    """Run the probe that the config names; only rank 0 has an outcome."""

    def features(images: LabeledImages, views: list[str]) -> Features:
        where, workers = cfg.DATA.CACHE_DIR, cfg.DATA.NUM_WORKERS
        return cached_features(
            frozen,
            images,
            views,
            geometry(cfg),
            cache_dir=where,
            num_workers=workers,
            stop=saver.stop,
        )

    of_val = features(val, [CENTER])
    if cfg.PROBE == "online":
        outcome = probe_online(cfg, frozen, train, val, of_val, saver, saved)
        return outcome if rank() == 0 else None
    of_train = features(train, cached_views(cfg) if cfg.PROBE == "cached" else [CENTER])
    if rank() != 0:
        return None  # the rest takes one process
    if cfg.PROBE == "knn":
        return probe_knn(cfg, train, val, of_train, of_val, device())
    return probe_cached(cfg, train, val, of_train, of_val, device(), saver, saved)


def announce(cfg: CfgNode, protocol: Protocol, train: LabeledImages, val: LabeledImages) -> None:
    """Log what is measured, and how it differs from the paper's protocol."""
    log.info(
        "%s: %s train and %s val images of %d classes, on %d x %s.",
        *(protocol.id, f"{len(train):,}", f"{len(val):,}", len(train.classes)),
        *(world_size(), device().type),
    )
    if cfg.PROBE == "online" and protocol.id != IMAGENET_LINEAR_MOCO:
        differences = "; ".join(deviations(cfg, sizes_of(train, val)))
        log.info("This is not %s: %s.", IMAGENET_LINEAR_MOCO, differences)
