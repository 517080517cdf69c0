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
from detectron2.modeling import build_model
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger
from torch import nn

from detection.convert.certificate import Certificate
from detection.data.catalog import ground_truth_of, register_datasets, source_of
from detection.errors import DetectionError
from detection.scoring import SCORERS, ScorerResult, metrics_of
from detection.scoring.evaluator import SavedPassEvaluator
from detection.train.checkpoint import Stopwatch, load_detector
from detection.train.protocol import WITHOUT_EFFECT, protocol_of
from detection.train.trainer import train
from kscl.config.tree import config_hash, save_config
from kscl.records.fingerprint import fingerprint
from kscl.records.record import RECORD_FILE, make_record, read_record, write_record
from kscl.runtime.files import write_atomically

OWNER_FILE = "run.json"
ROLES = ("train", "test")
SCORES_FILE = "scores.json"


@dataclass(frozen=True)
class Trial:
    """All that one process needs to know; travels to every rank."""

    cfg: CfgNode  # with this trial's SEED and OUTPUT_DIR, frozen
    certificate: Certificate | None  # None: from scratch, as asked
    resume: bool
    scaled_from: int  # processes that the protocol was written for, 0 if it was taken as it is
    data: dict[str, dict[str, Any]]  # the sets' fingerprints by role, taken before the start


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
        "data": " ".join(trial.data[role]["hash"] for role in ROLES),
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


def refuse_run_folder(cfg: CfgNode) -> None:
    """A run's saved pass is the one of its record: no other may take its place."""
    if (Path(cfg.OUTPUT_DIR) / OWNER_FILE).is_file():
        raise DetectionError(
            f"{cfg.OUTPUT_DIR} holds a run, whose detections would be written over. Choose another "
            "OUTPUT_DIR for this evaluation."
        )


def score_detector(cfg: CfgNode) -> int:
    """Evaluate MODEL.WEIGHTS, a trained detector; on every rank."""
    _prepare(cfg)
    setup_logger(distributed_rank=comm.get_rank(), name="detection")  # by which the scores are told
    model = build_model(cfg)
    load_detector(model, cfg.MODEL.WEIGHTS)
    evaluate(cfg, model)
    return 0


def _prepare(cfg: CfgNode) -> tuple[str, ...]:
    """What every rank needs before it builds a model; the class list."""
    if comm.get_world_size() > 1:
        comm.create_local_process_group(comm.get_world_size())
    return register_datasets(cfg.DATASETS.TRAIN, cfg.DATASETS.TEST, cfg.KSCL.CLASS_NAMES or None)


def run_trial(trial: Trial) -> int:
    """Train, evaluate and write the record; on every rank."""
    cfg = trial.cfg
    _set_up_logging(cfg.OUTPUT_DIR)
    classes = _prepare(cfg)
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
        data=trial.data,
        inputs=inputs,
        details=details,
        without_effect=WITHOUT_EFFECT,
    )
    write_record(record, cfg.OUTPUT_DIR)


def data_of(cfg: CfgNode) -> dict[str, dict[str, Any]]:
    """By role, a fingerprint of the config's registered sets, whatever they are called."""
    return {role: _data_fingerprint(cfg.DATASETS[role.upper()]) for role in ROLES}


def _data_fingerprint(names: Sequence[str]) -> dict[str, Any]:
    """Of images and annotations; by the parts a leaderboard can see that they have changed."""
    digest, files, size = hashlib.sha256(), 0, 0
    parts: dict[Path, str] = {}
    for name in names:
        source = source_of(name)
        images = fingerprint(source.root)
        digest.update(f"{images.hash} {ground_truth_of(name).fingerprint}\n".encode())
        files, size = files + images.files, size + images.bytes
        parts[source.root] = images.hash
        if source.json_file is not None:
            parts[source.json_file] = fingerprint(source.json_file).hash
    return {
        "hash": digest.hexdigest()[:16],
        "files": files,
        "bytes": size,
        "parts": [{"path": str(path.absolute()), "hash": hash_} for path, hash_ in parts.items()],
    }
