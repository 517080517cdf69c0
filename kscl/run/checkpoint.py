"""Checkpoints that survive a kill at any moment, a damaged file and a full disk.

A checkpoint is written under a temporary name, synced, and only then renamed; its name carries the
step and a checksum of the content, so it appears complete or not at all, and a file that was
truncated or changed later is recognized. Older ones are removed after that. Reading never runs code
from a file. Pretraining, probes and detection all save and load their state here; the content is
tensors and plain data.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from kscl.backbone_file import read_plain
from kscl.errors import KsclError
from kscl.runtime.failures import DISK_FULL
from kscl.runtime.files import sha256_of, sync_folder
from kscl.runtime.logs import LOGGER

CHECKPOINT_FOLDER = "checkpoints"
CHECKSUM_LENGTH = 16
NAME = re.compile(rf"checkpoint-(\d{{9}})-([0-9a-f]{{{CHECKSUM_LENGTH}}})\.pt")
UNFINISHED = ".checkpoint-*.unfinished"
CONTAINER_BYTES = 2**20  # an upper bound for names, sizes and padding around the tensors
log = logging.getLogger(LOGGER)


class CheckpointError(KsclError):
    """A checkpoint that cannot be written or read."""


def save_checkpoint(folder: Path, step: int, content: Mapping[str, Any], keep: int) -> Path:
    """Write the checkpoint of this step, then remove all but the newest `keep` up to this step.

    Later ones were too damaged to resume from; they are removed once the run is past them.
    """
    stem = f"checkpoint-{step:09d}"
    path, _ = _write(folder, stem, content, lambda digest: f"{stem}-{digest[:CHECKSUM_LENGTH]}.pt")
    until_now = [it for it in find_checkpoints(folder) if it != path and step_of(it) <= step]
    for old in until_now[keep - 1 :]:
        old.unlink(missing_ok=True)
    return path


def write_tensors(path: Path, content: Mapping[str, Any]) -> str:
    """Write one file of tensors and plain data under a fixed name; return its SHA-256."""
    return _write(path.parent, path.name, content, lambda _: path.name)[1]


def check_room(folder: Path, tensor_bytes: int) -> None:
    """Raise an error now if the disk cannot take a checkpoint of this size later."""
    needed = tensor_bytes + CONTAINER_BYTES
    if shutil.disk_usage(folder).free < needed:
        raise _disk_full(folder, needed)


def find_checkpoints(folder: Path) -> list[Path]:
    """Return all files in this folder named like a checkpoint, newest first.

    Links are ignored: a run resumes only from files in its own folder.
    """
    named = (path for path in folder.glob("*.pt") if NAME.fullmatch(path.name))
    return sorted((path for path in named if not path.is_symlink()), reverse=True)


def load_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest intact checkpoint and its content, or None if there never was one."""
    candidates = find_checkpoints(folder)
    for path in candidates:
        try:
            intact = is_intact(path)
        except OSError as error:
            log.warning("%s cannot be read (%s). Trying the checkpoint before it.", path, error)
            continue
        if intact:
            return path, read_plain(path)
        log.warning(
            "%s is damaged: it does not match its checksum. Trying the checkpoint before it.", path
        )
    if candidates:
        raise CheckpointError(
            f"{folder}: every checkpoint is damaged ({len(candidates)} of them), so there is "
            "nothing to resume from. Start again with another OUTPUT_DIR."
        )
    return None


def is_intact(path: Path) -> bool:
    """Return whether a checkpoint's content matches the checksum in its name."""
    return sha256_of(path).startswith(path.stem.rpartition("-")[2])


def step_of(path: Path) -> int:
    """Return the step that a checkpoint's name carries."""
    return int(path.stem.split("-")[1])


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process left; only for the one process that owns the folder."""
    for path in folder.glob(UNFINISHED):
        path.unlink(missing_ok=True)


def bytes_of(content: object) -> int:
    """Return the size of all tensors in nested dicts and lists."""
    if isinstance(content, Tensor):
        return content.nbytes
    if isinstance(content, Mapping):
        return sum(bytes_of(value) for value in content.values())
    if isinstance(content, list | tuple):
        return sum(bytes_of(value) for value in content)
    return 0


def _write(
    folder: Path, stem: str, content: Mapping[str, Any], name_of: Callable[[str], str]
) -> tuple[Path, str]:
    """Write under a temporary name, sync, and rename by the SHA-256, which is returned as well.

    A failure is explained, and leaves nothing unfinished.
    """
    unfinished = folder / f".{stem}.unfinished"
    tensor_bytes = bytes_of(content)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_room(folder, tensor_bytes)
        with unfinished.open("wb") as file:
            target = _Hashing(file)
            try:
                torch.save(dict(content), target)  # type: ignore[arg-type]
            except RuntimeError:
                if target.error is not None:  # torch does not pass the reason on
                    raise target.error from None
                raise
            file.flush()
            os.fsync(file.fileno())
        digest = target.digest.hexdigest()
        path = unfinished.rename(folder / name_of(digest))
        sync_folder(folder)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise _disk_full(folder, tensor_bytes + CONTAINER_BYTES) from error
        raise CheckpointError(
            f"{folder}: no checkpoint can be written: {error}. Check the folder and its disk."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
    return path, digest


class _Hashing:
    """A file written front to back that keeps its checksum and the last error."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.digest.update(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def _disk_full(folder: Path, needed: int) -> CheckpointError:
    kept = find_checkpoints(folder)
    intact = f"the one before it is intact: {kept[0]}" if kept else "there is none before it"
    free = shutil.disk_usage(folder).free
    return CheckpointError(
        f"{folder}: the disk is too full for a checkpoint of {needed / 2**20:,.1f} MiB "
        f"({needed:,} bytes; {free:,} are free); {intact}. Free some space and resume with "
        "--resume, or choose another OUTPUT_DIR."
    )
