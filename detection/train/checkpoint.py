"""What a detection run saves and resumes from: tensors and plain data, checked before use."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.engine import SimpleTrainer
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from detection.errors import DetectionError
from kscl.backbone_file import read_plain
from kscl.config.tree import leaves, plain, value_at
from kscl.engine.checkpoint import (
    CHECKPOINT_FOLDER,
    CONTAINER_BYTES,
    NAME,
    bytes_of,
    find_checkpoints,
    is_intact,
    save_checkpoint,
    write_tensors,
)
from kscl.engine.preview.check import existing_parent
from kscl.records.record import RECORD_FILE, read_record
from kscl.runtime.files import sha256_of, write_atomically

KEPT = 2
DETECTOR_FILE = "model_final.pth"
DETECTOR_HASH = "detector_sha256"  # in the details of a record
CLASSES = "classes"  # there and in a checkpoint: names in the order of the detector's outputs
INPUT_KEYS = ("MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD", "INPUT.FORMAT")


class Stopwatch:
    """Seconds of work over all the restarts of a run."""

    def __init__(self) -> None:
        self.before, self.start = 0.0, time.monotonic()

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self.before + time.monotonic() - self.start

    def restart_at(self, seconds: float) -> None:
        """Continue from the seconds of an earlier process."""
        self.before, self.start = seconds, time.monotonic()


def save_state(
    folder: Path,
    iterations: int,
    trainer: SimpleTrainer,
    model: nn.Module,
    about: Mapping[str, Any],
) -> Path:
    """Write the state after so many iterations; refuse weights that nothing can resume from."""
    broken = [name for name, value in model.named_parameters() if not value.isfinite().all()]
    if broken:
        raise FloatingPointError(f"{broken[0]} is NaN or infinite after iteration {iterations}.")
    content = {**about, "model": model.state_dict(), "trainer": trainer.state_dict()}
    return save_checkpoint(folder / CHECKPOINT_FOLDER, iterations, content, KEPT)


def restore_state(
    path: Path, content: Mapping[str, Any], trainer: SimpleTrainer, model: nn.Module
) -> int:
    """Put a checkpoint into model and trainer, complete or not at all; return its iterations."""
    try:
        model.load_state_dict(content["model"], strict=True)
        trainer.load_state_dict(content["trainer"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DetectionError(
            f"{path} does not hold the state of this detector, so it is not resumed from: {error}. "
            "Delete it to resume from the checkpoint before it, or choose another OUTPUT_DIR."
        ) from error
    return trainer.iter + 1


def check_room_for(folder: Path, model: nn.Module) -> None:
    """Raise an error before training if the disk cannot take all that it will hold at a time.

    A checkpoint is complete before an older one goes; what a resumed run has written is there.
    """
    detector = bytes_of(model.state_dict()) + CONTAINER_BYTES
    checkpoint = detector + bytes_of(list(model.parameters()))  # with the momentum
    written = [*find_checkpoints(folder / CHECKPOINT_FOLDER), folder / DETECTOR_FILE]
    there = sum(path.stat().st_size for path in written if path.is_file())
    needed = (KEPT + 1) * checkpoint + detector - there
    free = shutil.disk_usage(existing_parent(folder)).free
    if free < needed:
        raise DetectionError(
            f"The disk of OUTPUT_DIR {folder} has {free / 2**20:,.1f} MiB free, but {KEPT + 1} "
            f"checkpoints and the trained detector take {needed / 2**20:,.1f} MiB more. Make room, "
            "or choose another OUTPUT_DIR."
        )


def export_detector(folder: Path, model: nn.Module) -> str:
    """Write the weights of the trained detector alone; return their SHA-256.

    With statistics that are not numbers it would find nothing, and Detectron2 would not say so.
    """
    for name, norm in model.named_modules():
        if isinstance(norm, BatchNorm) and not _is_usable(norm):
            raise DetectionError(
                f"{name} has a mean or variance that is NaN, infinite or negative, so this "
                "detector would find nothing. naiveSyncBN and TEST.PRECISE_BN take a variance as a "
                "difference, which is rounded below 0 where a channel hardly varies: use larger or "
                "more varied images, or set TEST.PRECISE_BN.ENABLED False. Otherwise lower "
                "SOLVER.BASE_LR. Start in a new OUTPUT_DIR."
            )
    return write_tensors(folder / DETECTOR_FILE, {"model": model.state_dict()})


def _is_usable(norm: BatchNorm) -> bool:
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None:
        return True
    return bool(
        mean.isfinite().all() and variance.isfinite().all() and (variance > -norm.eps).all()
    )


def load_detector(model: nn.Module, path: str) -> None:
    """Load a complete trained detector; a missing, extra or changed tensor is an error."""
    file = Path(path)
    if not file.is_file():
        raise DetectionError(
            f"MODEL.WEIGHTS {path}: there is no such file. Name a trained detector."
        )
    _refuse_damaged(file)
    content = read_plain(file)
    tensors = content.get("model", content)
    try:
        model.load_state_dict(tensors, strict=True)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise DetectionError(
            f"{path} is not a trained detector of this config, so it is not scored: {error}"
        ) from error


def refuse_other_use(cfg: CfgNode, class_names: Sequence[str]) -> None:
    """Raise an error if the record beside a detector tells of other classes or another input."""
    weights = Path(cfg.MODEL.WEIGHTS)
    if not weights.is_file() or not (weights.parent / RECORD_FILE).is_file():
        return
    record = read_record(weights.parent / RECORD_FILE)
    trained = dict(leaves(record["config"]["values"])) | {CLASSES: record["details"].get(CLASSES)}
    now = {key: plain(value_at(cfg, key)) for key in INPUT_KEYS} | {CLASSES: list(class_names)}
    lines = "".join(
        f"\n  {key}: {trained[key]!r} in training, {value!r} now"
        for key, value in now.items()
        if trained.get(key) not in (None, value)  # None: a record of another tool or release
    )
    if lines:
        raise DetectionError(
            f"{weights} was trained with other settings, so it is not scored with these:{lines}\n"
            "Use the config.yaml of its run; KSCL.CLASS_NAMES sets the classes and their order."
        )


def _refuse_damaged(file: Path) -> None:
    """Compare a file with its checksum: in its name, or in the record beside it."""
    if NAME.fullmatch(file.name):
        intact = is_intact(file)
    elif file.name == DETECTOR_FILE and (file.parent / RECORD_FILE).is_file():
        intact = read_record(file.parent / RECORD_FILE)["details"].get(DETECTOR_HASH) in (
            None,  # a record of another tool or release
            sha256_of(file),
        )
    else:
        return
    if not intact:
        raise DetectionError(
            f"{file} is damaged or was changed: it does not match its checksum. Restore it, or "
            "score another detector."
        )


def forget_metrics_after(folder: Path, iteration: int) -> None:
    """Drop the lines that an interrupted run wrote after its checkpoint: they will come again."""
    path = folder / "metrics.json"
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["iteration"] <= iteration:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # an incomplete line
    write_atomically(path, "".join(f"{line}\n" for line in kept).encode())
