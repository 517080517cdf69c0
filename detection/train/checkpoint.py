"""What a detection run saves and resumes from: tensors and plain data, checked before use."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detectron2.engine import SimpleTrainer
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from detection.errors import DetectionError
from kscl.backbone_file import read_plain
from kscl.engine.checkpoint import (
    CHECKPOINT_FOLDER,
    NAME,
    bytes_of,
    check_room,
    is_intact,
    save_checkpoint,
    write_tensors,
)
from kscl.records.record import RECORD_FILE, read_record
from kscl.runtime.files import sha256_of, write_atomically

KEPT = 2
DETECTOR_FILE = "model_final.pth"
DETECTOR_HASH = "detector_sha256"  # in the details of a record


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
    """Raise an error before training if the disk cannot take its checkpoints."""
    momentum = bytes_of(list(model.parameters()))
    check_room(folder, bytes_of(model.state_dict()) + momentum)


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
