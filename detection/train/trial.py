"""One trial: its own folder, training, one inference pass, all scorers, one record."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger

from detection.convert.certificate import Certificate
from detection.data.sets import ROLES, RunSets
from detection.errors import DetectionError
from detection.train.checkpoint import CLASSES, DETECTOR_HASH, Stopwatch, export_detector
from detection.train.evaluation import evaluate, evaluate_detector
from detection.train.failures import explained
from detection.train.processes import WHAT_CHANGES, hints
from detection.train.protocol import WITHOUT_EFFECT
from detection.train.record import write_trial_record
from detection.train.trainer import Saved, Stopped, train
from kscl.backbone_file import read_plain
from kscl.config.tree import config_values, save_config
from kscl.engine.checkpoint import step_of
from kscl.engine.run_dir import find_start, refuse_changes
from kscl.engine.world_size import WORLD_SIZE, WORLD_SIZES, required, world_sizes
from kscl.records.record import RECORD_FILE, read_record
from kscl.runtime.folder_lock import only_run_in
from kscl.runtime.precision import set_numerics
from kscl.runtime.processes.ranks import local_world_size, on_first_rank, wait_for_all
from kscl.runtime.processes.signals import StopRequest, stop_requests


@dataclass(frozen=True)
class Job:
    """What the command asks of every rank."""

    cfg: CfgNode  # with this trial's SEED and OUTPUT_DIR, frozen
    certificate: Certificate | None  # None: from scratch, as asked
    sets: RunSets
    resume: bool = False
    auto_resume: bool = False
    allow_world_size_change: bool = False
    scaled_from: int = 0  # processes that the protocol was written for, 0 if used as it is
    lr_search: dict[str, Any] | None = None  # what a search for the learning rate found

    @property
    def folder(self) -> Path:
        """Where this trial writes."""
        return Path(self.cfg.OUTPUT_DIR)

    def identity(self) -> dict[str, Any]:
        """Return what must be the same on resume beside the config, wherever it is stored."""
        return {
            "weights": self.certificate.weights_sha256 if self.certificate else None,
            "data": {role: self.sets.fingerprints[role]["hash"] for role in ROLES},
        }

    def refuse_other_classes(self, before: Mapping[str, Any], where: Path) -> None:
        """Raise an error if a run had other classes, or in another order.

        No fingerprint tells of their order, and earlier versions did not save it.
        """
        now = list(self.sets.class_names)
        refuse_changes({CLASSES: before.get(CLASSES, now)}, {CLASSES: now}, where)


def is_finished(job: Job) -> bool:
    """Return whether this trial has a record; a record of another run is an error."""
    path = job.folder / RECORD_FILE
    if not path.is_file():
        return False
    record = read_record(path)
    before = {
        **record["config"]["values"],
        "weights": record["inputs"].get("weights"),
        "data": {role: record["data"].get(role, {}).get("hash") for role in ROLES},
    }
    now = {**config_values(job.cfg), **job.identity()}
    refuse_changes(before, now, job.folder, WITHOUT_EFFECT, hints(job.cfg))
    job.refuse_other_classes(record["details"], job.folder)
    if not (job.resume or job.auto_resume):
        raise DetectionError(
            f"{job.folder} holds this run already, and it is finished. Keep it with --resume, or "
            "choose another OUTPUT_DIR."
        )
    return True


def run_trial(job: Job) -> int:
    """Train, evaluate and write the record, on every rank; return the exit code."""
    set_numerics(tf32=job.cfg.KSCL.TF32, cudnn_benchmark=job.cfg.CUDNN_BENCHMARK)
    with explained(job.cfg, job.scaled_from), contextlib.ExitStack() as until_the_end:
        saved = _claim(job, until_the_end)
        if (job.folder / RECORD_FILE).is_file():  # another process wrote it while this one waited
            return 0
        _set_up_logging(job.cfg.OUTPUT_DIR)
        until_the_end.enter_context(local_ranks())
        with stop_requests() as stop:
            try:
                _run(job, saved, stop)
            except Stopped:
                return stop.exit_code
    return 0


def _claim(job: Job, until_the_end: contextlib.ExitStack) -> Saved | None:
    """Make the folder this trial's until the end; return the checkpoint to resume from."""
    found: list[Saved | None] = []

    def claim() -> Path | None:
        until_the_end.enter_context(only_run_in(job.folder))
        also = {**job.identity(), **required(job.allow_world_size_change)}
        newest = find_start(
            job.cfg, job.resume, job.auto_resume, WITHOUT_EFFECT, also, hints(job.cfg)
        )
        if newest is not None:
            job.refuse_other_classes(newest[1], newest[0])
        found.append(newest)
        # Nothing is left to refuse. The config is written first: it tells whose folder this is.
        save_config(job.cfg, job.folder)
        return newest[0] if newest is not None else None

    path = on_first_rank(claim)
    if path is None:
        return None
    return found[0] if found else (path, read_plain(path))


def _run(job: Job, saved: Saved | None, stop: StopRequest) -> None:
    cfg, stopwatch = job.cfg, Stopwatch()
    begin = step_of(saved[0]) if saved else 0
    parts = world_sizes(saved[1] if saved else None, begin, WHAT_CHANGES)
    if saved is not None:
        stopwatch.restart_at(saved[1]["seconds"])
        job.sets.bad_images.update(saved[1].get("bad_images", {}))

    def about() -> dict[str, Any]:
        return {
            "config": config_values(cfg),
            **job.identity(),
            CLASSES: list(job.sets.class_names),
            WORLD_SIZE: comm.get_world_size(),
            WORLD_SIZES: parts,
            "seconds": stopwatch.seconds(),
            "bad_images": dict(job.sets.bad_images),
        }

    model = train(cfg, job.sets, saved, about, stop)
    trained = stopwatch.seconds()
    detector = export_detector(job.folder, model) if comm.is_main_process() else ""
    scores = evaluate(cfg, model, job.sets, stop)
    bad_images = comm.gather(job.sets.bad_images)
    if comm.is_main_process():
        details = {
            CLASSES: list(job.sets.class_names),
            "seconds_of_training": round(trained, 1),
            "scaled_from_processes": job.scaled_from,
            "processes": comm.get_world_size(),
            WORLD_SIZES: parts,
            DETECTOR_HASH: detector,
            "bad_images": {name: why for found in bad_images for name, why in found.items()},
        }
        if job.lr_search is not None:
            details["lr_search"] = job.lr_search
        data = job.sets.fingerprints
        write_trial_record(cfg, job.certificate, data, scores, stopwatch.seconds(), details)
    wait_for_all()  # not in a collective of the GPUs: scoring may take long


def _set_up_logging(folder: str) -> None:
    """Send Detectron2's log to this trial's folder, and no longer to the one before."""
    setup_logger.cache_clear()
    for name in ("fvcore", "detectron2", "detection"):
        logging.getLogger(name).handlers.clear()
        setup_logger(folder, distributed_rank=comm.get_rank(), name=name)


@contextlib.contextmanager
def local_ranks() -> Iterator[None]:
    """Let Detectron2 know the ranks of this machine; it keeps groups, and with them their store."""
    if comm.get_world_size() == 1:
        yield
        return
    comm.create_local_process_group(local_world_size())
    try:
        yield
    finally:  # or a later trial of this process would meet its ranks in a group that has ended
        comm.create_local_process_group.cache_clear()
        comm._get_global_gloo_group.cache_clear()
        comm._LOCAL_PROCESS_GROUP = None


def score_detector(job: Job) -> int:
    """Evaluate MODEL.WEIGHTS, a trained detector, on every rank; return the exit code."""
    cfg = job.cfg
    set_numerics(tf32=cfg.KSCL.TF32, cudnn_benchmark=cfg.CUDNN_BENCHMARK)
    with explained(cfg), contextlib.ExitStack() as until_the_end:

        def claim() -> None:
            until_the_end.enter_context(only_run_in(job.folder))
            refuse_run_folder(job.folder)

        on_first_rank(claim)
        until_the_end.enter_context(local_ranks())
        setup_logger(distributed_rank=comm.get_rank(), name="detection")  # which prints the scores
        with stop_requests() as stop:
            try:
                evaluate_detector(cfg, job.sets, stop)
            except Stopped:
                return stop.exit_code
    return 0


def refuse_run_folder(folder: Path) -> None:
    """Raise an error if a folder holds a run: its saved pass is the one of its record."""
    if (folder / RECORD_FILE).is_file() or (folder / "config.yaml").is_file():
        raise DetectionError(
            f"{folder} holds a run, whose detections would be overwritten. Choose another "
            "OUTPUT_DIR for this evaluation."
        )
