"""Checkpoints that survive a kill at any moment, a damaged file and a full disk.

A checkpoint is written beside its place, synced, and only then named; the name carries the step
and a checksum of the content, so one rename makes it whole, and a file that was cut or changed
later is known for it. Older ones are removed after that. Reading never runs code from a file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from kscl.backbone_file import read_plain
from kscl.errors import KsclError
from kscl.runtime.files import sha256_of, sync_folder
from kscl.runtime.logs import LOGGER

CHECKPOINT_FOLDER = "checkpoints"
NAME = re.compile(r"checkpoint-(\d{9})-([0-9a-f]{16})\.pt")
UNFINISHED = ".checkpoint-*.unfinished"
CONTAINER_BYTES = 2**20  # names, sizes and padding around the tensors, generously
log = logging.getLogger(LOGGER)

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckpointError(KsclError):
    """A checkpoint that cannot be written or read."""


def save_checkpoint(folder: Path, step: int, content: Mapping[str, Any], keep: int) -> Path:
    """Write the checkpoint of this step, then remove all but the newest `keep`."""
    needed = bytes_of(content) + CONTAINER_BYTES
    unfinished = folder / f".checkpoint-{step:09d}.unfinished"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < needed:
            raise OSError(errno.ENOSPC, "too little room")
        checksum = _write(unfinished, content)
        path = unfinished.rename(folder / f"checkpoint-{step:09d}-{checksum}.pt")
        sync_folder(folder)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise _disk_full(folder, needed) from error
        raise CheckpointError(f"{folder}: no checkpoint could be written: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
    for old in find_checkpoints(folder)[keep:]:
        old.unlink(missing_ok=True)
    return path


def find_checkpoints(folder: Path) -> list[Path]:
    """All that carry a checkpoint's name, the newest first."""
    return sorted((path for path in folder.glob("*.pt") if NAME.fullmatch(path.name)), reverse=True)


def load_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is whole, and what it holds; None where there never was one."""
    candidates = find_checkpoints(folder)
    for path in candidates:
        match = NAME.fullmatch(path.name)
        assert match is not None
        try:
            whole = sha256_of(path).startswith(match[2])
        except OSError as error:
            log.warning("%s cannot be read (%s); trying the one before it", path, error)
            continue
        if whole:
            return path, read_plain(path)
        log.warning("%s is damaged: it does not fit its checksum; trying the one before it", path)
    if candidates:
        raise CheckpointError(
            f"{folder}: every checkpoint is damaged ({len(candidates)} of them), so there is "
            "nothing to resume from: start again with another OUTPUT_DIR"
        )
    return None


def step_of(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} does not carry a checkpoint's name")
    return int(match[1])


def remove_unfinished(folder: Path) -> None:
    """What a killed process left; only for the one process that owns the folder."""
    for path in folder.glob(UNFINISHED):
        path.unlink(missing_ok=True)


def bytes_of(content: object) -> int:
    """Of all tensors in nested dicts and lists."""
    if isinstance(content, Tensor):
        return content.nbytes
    if isinstance(content, Mapping):
        return sum(bytes_of(value) for value in content.values())
    if isinstance(content, list | tuple):
        return sum(bytes_of(value) for value in content)
    return 0


def _write(path: Path, content: Mapping[str, Any]) -> str:
    """Save and sync; returns the checksum of what was written."""
    with path.open("wb") as file:
        target = _Hashing(file)
        try:
            torch.save(dict(content), target)  # type: ignore[arg-type]
        except RuntimeError:
            if target.error is not None:  # torch says no more than that it could not write
                raise target.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return target.digest.hexdigest()[:16]


class _Hashing:
    """A file to write to once, front to back, that remembers a checksum and the error it met."""

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
    return CheckpointError(
        f"{folder}: the disk is too full for a checkpoint of {_size(needed)} "
        f"({needed:,} bytes; {_size(shutil.disk_usage(folder).free)} are free); {intact}. "
        "Make room and go on with --resume, or keep fewer (CHECKPOINT.KEEP)"
    )


def _size(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"
