"""A detector before and after training: its structure, disk space and weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from detection.config import load_detection_config
from detection.convert.certificate import Certificate, verify_start
from detection.train.optimizer import STATES
from detection.train.protocol import WITHOUT_EFFECT
from kscl.backbone_file import read_plain
from kscl.config import CONFIG_FILE, config_values
from kscl.errors import KsclError
from kscl.records.record import RECORD_FILE, read_record
from kscl.run.checkpoint import (
    CHECKPOINT_FOLDER,
    CONTAINER_BYTES,
    NAME,
    bytes_of,
    find_checkpoints,
    is_intact,
    load_newest,
    step_of,
    write_tensors,
)
from kscl.run.engine import WORLD_SIZES, changed_keys
from kscl.run.task import Task
from kscl.runtime.files import existing_parent, sha256_of

DETECTOR_FILE = "model_final.pth"
DETECTOR_HASH = "detector_sha256"  # in the details of a record
CLASSES = "classes"  # there and in a checkpoint: names in the order of the detector's outputs
EVALUATIONS = "seconds_of_evaluations"  # in a checkpoint: of those during training
CHECKPOINTS = Task.keep + 1  # a new one is complete before the oldest is deleted
INFERENCE_FOLDER = "inference"  # in a run's folder, as in Detectron2: the run's record stays
# Keys that may differ between training a detector and scoring it; part of the protocol.
OF_SCORING = (
    "SOLVER.AMP.ENABLED",  # used in training only
    "KSCL.TF32",
    "KSCL.PROTOCOL",
    "KSCL.SCORER",
    "KSCL.CLASS_NAMES",  # the classes themselves are compared
    "INPUT.MIN_SIZE_TEST",
    "INPUT.MAX_SIZE_TEST",
    "MODEL.RPN.PRE_NMS_TOPK_TEST",
    "MODEL.RPN.POST_NMS_TOPK_TEST",
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST",
    "MODEL.ROI_HEADS.NMS_THRESH_TEST",
    "MODEL.RETINANET.SCORE_THRESH_TEST",
    "MODEL.RETINANET.NMS_THRESH_TEST",
    "MODEL.RETINANET.TOPK_CANDIDATES_TEST",
    "TEST.DETECTIONS_PER_IMAGE",
)


@dataclass(frozen=True)
class Training:
    """How a detector was trained, from the record of its run or a checkpoint."""

    run: Path
    config: Mapping[str, Any]
    classes: list[str]
    certificate: Certificate | None  # None: from scratch
    data: Mapping[str, Any]  # the fingerprint of the training sets
    parts: list[list[int]]  # [first iteration, processes]
    seconds: float
    iterations: int  # done; 0: all of them


def find_detector(cfg: CfgNode, is_named: bool) -> tuple[Path, Training | None]:
    """Return the weights to score, and their training if they are in the folder of a run.

    They are MODEL.WEIGHTS if the command line names it; otherwise those of the run in OUTPUT_DIR:
    its trained detector, or its newest checkpoint.
    """
    folder = Path(cfg.OUTPUT_DIR)
    if is_named or not (folder / CONFIG_FILE).is_file():
        path = Path(cfg.MODEL.WEIGHTS)
        if not path.is_file():
            raise KsclError(
                f"MODEL.WEIGHTS {cfg.MODEL.WEIGHTS}: there is no such file. Name a trained "
                "detector, or set OUTPUT_DIR to the folder of a run."
            )
    elif (folder / DETECTOR_FILE).is_file():
        path = folder / DETECTOR_FILE
    elif newest := load_newest(folder / CHECKPOINT_FOLDER):
        path = newest[0]
    else:
        raise KsclError(
            f"The run in OUTPUT_DIR {folder} has no weights yet. Train it (without --eval-only), "
            "or name a detector with MODEL.WEIGHTS."
        )
    return path, _training_of(path)


def inference_folder(run: Path) -> Path:
    """Return the first of inference, inference-2, … in a run that has no record."""
    folder, number = run / INFERENCE_FOLDER, 1
    while (folder / RECORD_FILE).exists():
        number += 1
        folder = run / f"{INFERENCE_FOLDER}-{number}"
    return folder


def _training_of(path: Path) -> Training | None:
    is_checkpoint = NAME.fullmatch(path.name) is not None
    if not (is_checkpoint or path.name == DETECTOR_FILE):
        return None
    run = path.parent.parent if is_checkpoint else path.parent
    if (run / RECORD_FILE).is_file():
        record = read_record(run / RECORD_FILE)
        details = record.details
        made = details.get("certificate")
        known = {
            "config": record.config.values,
            "classes": details[CLASSES],
            "certificate": made and Certificate(**{k: made[k] for k in made if k != "version"}),
            "data": record.data["train"],
            "parts": details[WORLD_SIZES],
            "seconds": details["seconds_of_training"],
        }
    elif (run / CONFIG_FILE).is_file():
        newest = (path, read_plain(path)) if is_checkpoint else load_newest(run / CHECKPOINT_FOLDER)
        if newest is None:
            return None
        saved = newest[1]
        known = {
            "config": saved["config"],
            "classes": saved["inputs"][CLASSES],
            "certificate": verify_start(load_detection_config(run / CONFIG_FILE)),
            "data": saved["data"]["train"],
            "parts": saved[WORLD_SIZES],
            "seconds": saved["seconds"] - saved[EVALUATIONS],
        }
    else:
        return None
    done = step_of(path) if is_checkpoint else 0
    settings = known["config"]
    is_complete = done == round(settings["KSCL"]["LONGER"] * settings["SOLVER"]["MAX_ITER"])
    return Training(run, iterations=0 if is_complete else done, **known)


def load_detector(model: nn.Module, path: Path) -> None:
    """Load a trained detector; a missing, extra or changed tensor is an error."""
    _refuse_damaged(path)
    content = read_plain(path)
    tensors = content.get("model", content)
    try:
        model.load_state_dict(tensors, strict=True)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise KsclError(f"{path} is not a trained detector of this config: {error}") from error


def refuse_other_use(
    cfg: CfgNode, class_names: Sequence[str], path: Path, training: Training
) -> None:
    """Raise an error if a detector was trained on other classes or with other settings."""
    changes = changed_keys(training.config, config_values(cfg), (*WITHOUT_EFFECT, *OF_SCORING))
    if training.classes != list(class_names):
        changes.append((CLASSES, training.classes, list(class_names)))
    lines = "".join(f"\n  {key}: {old!r} in training, {new!r} now" for key, old, new in changes)
    if lines:
        raise KsclError(
            f"{path} was trained with other settings:{lines}\nUse "
            f"{training.run / CONFIG_FILE}; KSCL.CLASS_NAMES sets the classes and their order."
        )


def _refuse_damaged(file: Path) -> None:
    """Compare a file with the checksum in its name or in the record beside it."""
    if NAME.fullmatch(file.name):
        intact = is_intact(file)
    elif file.name == DETECTOR_FILE and (file.parent / RECORD_FILE).is_file():
        record = read_record(file.parent / RECORD_FILE)
        intact = record.details[DETECTOR_HASH] == sha256_of(file)
    else:
        return
    if not intact:
        raise KsclError(
            f"{file} does not match its checksum: it is damaged or was changed. Restore it, or "
            "score another detector."
        )


def refuse_run_folder(folder: Path) -> None:
    """Raise an error if a folder has a run or an evaluation, which are never overwritten."""
    if (folder / RECORD_FILE).is_file() or (folder / CONFIG_FILE).is_file():
        raise KsclError(
            f"{folder} has a run, whose detections would be overwritten. Choose another OUTPUT_DIR "
            "for this evaluation."
        )


def build_on_meta(cfg: CfgNode) -> nn.Module:
    """Return the detector on the meta device; a config that cannot be built is an error."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "meta"
    try:
        with torch.device("meta"):  # structure only
            return build_model(cfg)
    except KsclError:
        raise
    except Exception as error:  # Detectron2 raises many kinds for keys that do not fit together
        raise KsclError(
            f"No detector can be built from this config ({type(error).__name__}: {error}). Correct "
            "the keys of MODEL and KSCL.TIMM, or start from a protocol in configs/detection/."
        ) from error


def check_room_for(cfg: CfgNode, model: nn.Module) -> None:
    """Raise an error if the disk is too small for what a run writes, or still has to write."""
    folder = Path(cfg.OUTPUT_DIR)
    detector = bytes_of(model.state_dict()) + CONTAINER_BYTES
    states = STATES.get(cfg.KSCL.OPTIMIZER, 1)
    checkpoint = detector + states * bytes_of(list(model.parameters()))
    written = [*find_checkpoints(folder / CHECKPOINT_FOLDER), folder / DETECTOR_FILE]
    there = sum(path.stat().st_size for path in written if path.is_file())
    needed = CHECKPOINTS * checkpoint + detector - there
    free = shutil.disk_usage(existing_parent(folder)).free
    if free < needed:
        raise KsclError(
            f"The disk of OUTPUT_DIR {folder} has {free / 2**20:,.1f} MiB free, but {CHECKPOINTS} "
            f"checkpoints and the trained detector need {needed / 2**20:,.1f} MiB more. Make room, "
            "or choose another OUTPUT_DIR."
        )


def export_detector(folder: Path, model: nn.Module) -> str:
    """Write the weights of the trained detector; return their SHA-256.

    A detector with broken BatchNorm statistics would find nothing, without an error.
    """
    for name, norm in model.named_modules():
        if not isinstance(norm, BatchNorm) or norm.running_mean is None or norm.running_var is None:
            continue
        is_finite = norm.running_mean.isfinite().all() and norm.running_var.isfinite().all()
        if not is_finite or (norm.running_var <= -norm.eps).any():
            raise KsclError(
                f"The mean or variance of {name} is NaN, infinite or negative, so this detector "
                "would find nothing. In naiveSyncBN and TEST.PRECISE_BN a variance can be rounded "
                "below 0 if a channel hardly varies: use larger or more varied images, or set "
                "TEST.PRECISE_BN.ENABLED False. Otherwise lower SOLVER.BASE_LR. Start in a new "
                "OUTPUT_DIR."
            )
    return write_tensors(folder / DETECTOR_FILE, {"model": model.state_dict()})
