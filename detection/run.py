"""One trial: a folder of its own, training, one inference pass, both scorers, one record."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import build_detection_test_loader
from detectron2.evaluation import inference_on_dataset
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger
from torch import nn

from detection.certificate import Certificate
from detection.checkpointing import Stopwatch
from detection.datasets import ground_truth_of, register_datasets, source_of
from detection.errors import DetectionError
from detection.evaluator import SavedPassEvaluator
from detection.protocol import WITHOUT_EFFECT, protocol_of
from detection.scoring import SCORERS, ScorerResult, metrics_of
from detection.trainer import train
from kscl.config import config_hash, save_config
from kscl.files import write_atomically
from kscl.fingerprint import fingerprint
from kscl.records import RECORD_FILE, make_record, read_record, write_record

OWNER_FILE = "run.json"
SCORES_FILE = "scores.json"


@dataclass(frozen=True)
class Trial:
    """All that one process needs to know; travels to every rank."""

    cfg: CfgNode  # with this trial's SEED and OUTPUT_DIR, frozen
    certificate: Certificate | None  # None: from scratch, as asked
    resume: bool
    scaled_from: int  # processes that the protocol was written for, 0 if it was taken as it is


def finished(trial: Trial) -> dict[str, Any] | None:
    """The record of a trial that has run to its end with these very settings."""
    path = Path(trial.cfg.OUTPUT_DIR) / RECORD_FILE
    if not path.is_file():
        return None
    _refuse_other_owner(trial)
    return read_record(path)


def claim_folder(trial: Trial) -> None:
    """Make the folder this trial's, or refuse one that belongs to another run."""
    folder = Path(trial.cfg.OUTPUT_DIR)
    if (folder / OWNER_FILE).is_file():
        _refuse_other_owner(trial)
        if not trial.resume:
            raise DetectionError(
                f"{folder} holds this run already, finished or not. Go on with --resume, or choose "
                "another OUTPUT_DIR."
            )
    elif folder.is_dir() and any(folder.iterdir()):
        raise DetectionError(
            f"{folder} is not empty and holds no run of this tool. Choose another OUTPUT_DIR."
        )
    write_atomically(folder / OWNER_FILE, json.dumps(_owner(trial)).encode())
    save_config(trial.cfg, folder)


def _owner(trial: Trial) -> dict[str, str | None]:
    return {
        "settings": config_hash(trial.cfg, WITHOUT_EFFECT),
        "weights": trial.certificate.weights_sha256 if trial.certificate else None,
    }


def _refuse_other_owner(trial: Trial) -> None:
    ours = _owner(trial)
    theirs = json.loads((Path(trial.cfg.OUTPUT_DIR) / OWNER_FILE).read_text())
    different = [name for name in ours if ours[name] != theirs.get(name)]
    if different:
        raise DetectionError(
            f"{trial.cfg.OUTPUT_DIR} belongs to a run with other {' and '.join(different)}: what "
            "lies there would give that run's AP. Choose another OUTPUT_DIR."
        )


def run_trial(trial: Trial) -> int:
    """Train, evaluate and write the record; on every rank."""
    cfg = trial.cfg
    if comm.get_world_size() > 1:
        comm.create_local_process_group(comm.get_world_size())
    _set_up_logging(cfg.OUTPUT_DIR)
    classes = register_datasets(cfg.DATASETS.TRAIN, cfg.DATASETS.TEST, cfg.KSCL.CLASS_NAMES or None)
    stopwatch = Stopwatch()
    model = train(cfg, trial.certificate, stopwatch, trial.resume)
    trained = stopwatch.seconds()
    scores = evaluate(cfg, model)
    if comm.is_main_process():
        details = {"classes": list(classes), "seconds_of_training": round(trained, 1)}
        write_trial_record(trial, scores, stopwatch.seconds(), details)
    comm.synchronize()
    return 0


def _set_up_logging(folder: str) -> None:
    """Detectron2's logging into this trial's folder, and no longer into the one before."""
    setup_logger.cache_clear()
    for name in ("fvcore", "detectron2", "detection"):
        logging.getLogger(name).handlers.clear()
        setup_logger(folder, distributed_rank=comm.get_rank(), name=name)


def evaluate(cfg: CfgNode, model: nn.Module) -> dict[str, ScorerResult]:
    """One pass over the test set, saved, scored by every scorer; empty on ranks other than 0."""
    (name,) = cfg.DATASETS.TEST
    order = sorted(SCORERS, key=lambda scorer: scorer != cfg.KSCL.SCORER)
    evaluator = SavedPassEvaluator(name, cfg.OUTPUT_DIR, order)
    inference_on_dataset(model, build_detection_test_loader(cfg, name), evaluator)
    if comm.is_main_process():
        text = json.dumps(evaluator.scores, indent=1)
        write_atomically(Path(cfg.OUTPUT_DIR) / SCORES_FILE, text.encode())
    return evaluator.scores


def write_trial_record(
    trial: Trial, scores: dict[str, ScorerResult], seconds: float, details: dict[str, Any]
) -> None:
    cfg, certificate = trial.cfg, trial.certificate
    inputs: dict[str, str] = {}
    backbone: dict[str, Any] = {"method": "from scratch"}
    if certificate is not None:
        inputs = {"weights": certificate.weights_sha256, "backbone": certificate.source_sha256}
        backbone = certificate.backbone
        details["certificate"] = certificate.as_dict()
    headline = scores[cfg.KSCL.SCORER]
    details |= {
        "backbone": backbone,
        "scorer": cfg.KSCL.SCORER,
        "per_class": headline["per_class"],
        "absent_classes": headline["absent_classes"],
        "curves": headline["curves"],
        "scaled_from_processes": trial.scaled_from,
        "processes": comm.get_world_size(),
    }
    record = make_record(
        kind="detection",
        name=Path(cfg.OUTPUT_DIR).name,
        protocol=protocol_of(cfg),
        metrics=metrics_of(scores, cfg.KSCL.SCORER),
        seconds=seconds,
        seed=cfg.SEED,
        cfg=cfg,
        data={role: data_fingerprint(cfg.DATASETS[role.upper()]) for role in ("train", "test")},
        inputs=inputs,
        details=details,
        without_effect=WITHOUT_EFFECT,
    )
    write_record(record, cfg.OUTPUT_DIR)


def data_fingerprint(names: Sequence[str]) -> dict[str, Any]:
    """Of the images and the annotations of registered sets, whatever the sets are called."""
    digest, files, size = hashlib.sha256(), 0, 0
    for name in names:
        images = fingerprint(source_of(name).root)
        digest.update(f"{images.hash} {ground_truth_of(name).fingerprint}\n".encode())
        files, size = files + images.files, size + images.bytes
    return {"hash": digest.hexdigest()[:16], "files": files, "bytes": size}
