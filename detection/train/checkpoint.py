"""Detectron2's checkpoints, written so that a kill at any moment leaves a good one."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from torch import nn

from detection.errors import DetectionError
from kscl.backbone_file import read_plain
from kscl.runtime.files import write_atomically


class AtomicCheckpointer(DetectionCheckpointer):
    """Saves under a temporary name first, and only then says that it is the last one."""

    def save(self, name: str, **kwargs: Any) -> None:
        if not self.save_dir or not self.save_to_disk:
            return
        parts = {key: part.state_dict() for key, part in self.checkpointables.items()}
        content = io.BytesIO()
        torch.save({"model": self.model.state_dict(), **parts, **kwargs}, content)
        write_atomically(Path(self.save_dir) / f"{name}.pth", content.getvalue())
        self.tag_last_checkpoint(f"{name}.pth")

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        write_atomically(Path(self.save_dir) / "last_checkpoint", last_filename_basename.encode())


def load_detector(model: nn.Module, path: str) -> None:
    """Load a whole trained detector; a tensor that is missing or left over is an error."""
    if not Path(path).is_file():
        raise DetectionError(f"MODEL.WEIGHTS '{path}': no such file. Name a trained detector.")
    content = read_plain(Path(path))
    tensors = content.get("model", content)
    try:
        model.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise DetectionError(
            f"{path} is not a trained detector of this config, so it is not scored: {error}"
        ) from error


class Stopwatch:
    """Seconds of work over all the restarts of a run."""

    def __init__(self) -> None:
        self.before, self.start = 0.0, time.monotonic()

    def seconds(self) -> float:
        return self.before + time.monotonic() - self.start

    def state_dict(self) -> dict[str, float]:
        return {"seconds": self.seconds()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.before, self.start = state["seconds"], time.monotonic()


def forget_metrics_after(folder: Path, iteration: int) -> None:
    """Drop the lines that an interrupted run wrote past its checkpoint: they will come again."""
    path = folder / "metrics.json"
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["iteration"] <= iteration:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # half a line
    write_atomically(path, "".join(f"{line}\n" for line in kept).encode())
