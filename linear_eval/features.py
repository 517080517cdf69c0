"""Features of fixed views, computed once and cached on disk.

    <cache>/features/<key>/about.json       what the key is a hash of
                           features.f32     one slot per view, (N, D) float32, memory-mapped
                           center.json      this view's slot is complete; its checksum

The key covers the backbone, the images and everything in between, so features are reused only if
nothing changed. An interrupted extraction resumes at the first missing piece; the pieces are the
same for any number of ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import PIL
import torch
from fvcore.common.config import CfgNode
from PIL import Image
from torch import Tensor

from kscl.data.source import cache_folder
from kscl.errors import KsclError
from kscl.records.provenance import library_versions
from kscl.run.engine import Run, Stopped
from kscl.runtime.distributed import on_first_rank, rank, world_size
from kscl.runtime.failures import DISK_FULL
from kscl.runtime.files import write_atomically
from kscl.runtime.logs import LOGGER, progress
from kscl.runtime.precision import in_tf32
from linear_eval.backbone import Frozen, cache_name, my_turn
from linear_eval.images import (
    LabeledImages,
    file_state,
    fixed_view,
    load_views,
    slot,
    view_settings,
)

FORMAT = 1
BATCH = 128  # images; fewer if their features are large
MOST_NUMBERS = 2**23  # in the features of a batch
BATCHES = 16  # per piece
LIBRARIES = ("torch", "torchvision", "timm", "numpy")
log = logging.getLogger(LOGGER)


@dataclass(frozen=True)
class Features:
    """Image i in a view is row `slot(view) · count + i`."""

    rows: Tensor  # (slots · N, D), float32, memory-mapped
    count: int  # N
    decoded: int = 0  # images decoded because the cache did not have them

    def of_view(self, view: str) -> Tensor:
        """Return (N, D)."""
        return self.rows[slot(view) * self.count : (slot(view) + 1) * self.count]


class _Store:
    """One folder of the cache."""

    def __init__(self, folder: Path, count: int, dim: int) -> None:
        self.folder, self.count, self.dim = folder, count, dim
        self.file = folder / "features.f32"
        self.slot_bytes = count * dim * 4
        self.batch = min(BATCH, max(1, MOST_NUMBERS // dim))
        self.piece = BATCHES * self.batch  # images
        self.pieces = range(-(-count // self.piece))

    def seal(self, view: str) -> Path:
        """Return the file that marks a view as complete."""
        return self.folder / f"{view}.json"

    def marker(self, view: str, piece: int) -> Path:
        """Return the file that marks a piece as done."""
        return self.folder / f"{view}.{piece:06d}.done"

    def checksum(self, view: str) -> str:
        """Return the SHA-256 of a view's features on disk."""
        stored, start = np.memmap(self.file, mode="r"), slot(view) * self.slot_bytes
        return hashlib.sha256(stored[start : start + self.slot_bytes].data).hexdigest()

    def is_complete(self, view: str) -> bool:
        """Return whether a view's features are complete; discard damaged ones."""
        try:
            sealed = json.loads(self.seal(view).read_text())["sha256"]
            good = sealed == self.checksum(view)
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError):
            good = False
        if not good:
            log.warning("%s: view %s is damaged and will be recomputed.", self.file, view)
            self.seal(view).unlink()
            self.forget_pieces(view)
        return good

    def forget_pieces(self, view: str) -> None:
        for piece in self.pieces:
            self.marker(view, piece).unlink(missing_ok=True)

    def missing_pieces(self, views: Sequence[str]) -> list[int]:
        """Return the pieces that are not done in all views."""
        return [p for p in self.pieces if not all(self.marker(view, p).exists() for view in views)]

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a failed write into an error with its fix."""
        try:
            yield
        except OSError as error:
            reason = f"{self.folder} cannot be written: {error.strerror}"
            if error.errno in DISK_FULL:
                reason = f"{self.folder}: the disk has no room for {self.slot_bytes:,} bytes"
            raise KsclError(
                f"{reason}. Make room, or set DATA.CACHE_DIR or $KSCL_CACHE to another folder."
            ) from error

    def reserve(self, views: Sequence[str]) -> None:
        """Allocate the disk space, so that a full disk is reported before hours of work."""
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.file.open("ab") as file:
                for view in views:
                    start = slot(view) * self.slot_bytes
                    os.posix_fallocate(file.fileno(), start, self.slot_bytes)

    def write(self, view: str, piece: int, rows: np.ndarray) -> None:
        with self.writing():
            with self.file.open("r+b") as file:
                file.seek(slot(view) * self.slot_bytes + piece * self.piece * self.dim * 4)
                file.write(rows.tobytes())
                file.flush()
                os.fsync(file.fileno())
            self.marker(view, piece).touch()

    def finish(self, views: Sequence[str]) -> None:
        """Mark the views as complete; raise an error if a piece is missing."""
        sealed = all(self.seal(view).exists() for view in views)  # by another run, meanwhile
        if not sealed and self.missing_pieces(views):
            raise KsclError(
                f"{self.folder}: pieces written by other processes are missing. Set DATA.CACHE_DIR "
                "to a folder that all machines share."
            )
        for view in views:
            content = json.dumps({"sha256": self.checksum(view)})
            write_atomically(self.seal(view), content.encode())
            self.forget_pieces(view)

    def open(self, decoded: int = 0) -> Features:
        """Map the features into memory."""
        # Copy-on-write: torch warns about read-only memory.
        mapped = np.memmap(self.file, np.float32, mode="c").reshape(-1, self.dim)
        return Features(torch.from_numpy(mapped), self.count, decoded)


def cached_features(
    cfg: CfgNode, frozen: Frozen, images: LabeledImages, views: Sequence[str], run: Run
) -> Features:
    """Return the features of these views of the images, cached if possible."""
    about = on_first_rank(lambda: _about(cfg, frozen, images))
    folder = cache_folder(cfg.DATA.CACHE_DIR) / "features" / cache_name(about)
    store, where = _Store(folder, len(images), frozen.dim), images.source.where

    def leave_while_waiting() -> None:
        if run.stop:
            raise Stopped

    def acquire() -> Iterator[int]:
        held.enter_context(my_turn(folder / ".lock", leave_while_waiting))
        yield from ()

    def prepare() -> list[int]:
        store.reserve(missing)
        write_atomically(folder / "about.json", json.dumps(about, indent=2).encode())
        return store.missing_pieces(missing)

    with contextlib.ExitStack() as held:
        run.on_first_rank(acquire)
        missing = on_first_rank(lambda: [view for view in views if not store.is_complete(view)])
        if not missing:
            log.info("Features of %s: reusing %s.", where, folder)
            return store.open()
        pieces = on_first_rank(prepare)
        log.info("Features of %s: writing %s to %s.", where, " and ".join(missing), folder)
        for piece, rows in _extract(cfg, frozen, images, missing, pieces, store.batch):
            for number, view in enumerate(missing):
                store.write(view, piece, rows[:, number])
            if run.stop:
                break
        run.leave_if_stopped()  # waits until all ranks have written
        on_first_rank(lambda: store.finish(missing))
        sizes = (min(store.piece, len(images) - piece * store.piece) for piece in pieces)
        return store.open(sum(sizes))


def _about(cfg: CfgNode, frozen: Frozen, images: LabeledImages) -> dict[str, Any]:
    description = frozen.loaded.description
    versions = library_versions()
    levels = {"levels": sorted(frozen.levels)} if frozen.levels else {}
    return levels | {
        "format": FORMAT,
        "backbone": frozen.tensors_sha256,
        "arch": [description.arch, description.kwargs],
        "precision": f"{frozen.amp or torch.float32}{' tf32' if in_tf32(frozen.device) else ''}",
        "mean": frozen.mean.flatten().tolist(),
        "std": frozen.std.flatten().tolist(),
        "device": frozen.device.type,
        "data": images.fingerprint["hash"],
        "files": file_state(images),
        "views": view_settings(cfg),
        "libraries": {name: versions[name] for name in LIBRARIES}
        | {"pillow": PIL.__version__, "opencv": cv2.__version__},
    }


def _extract(
    cfg: CfgNode,
    frozen: Frozen,
    images: LabeledImages,
    views: Sequence[str],
    pieces: Sequence[int],
    batch_size: int,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (piece, rows (n, V, D)) for this rank's share of the pieces."""
    count, size = len(images), BATCHES * batch_size

    def make_views(picture: Image.Image, epoch: int, number: int) -> list[Image.Image]:
        return [fixed_view(picture, cfg.INPUT, view, number) for view in views]

    starts = [
        start
        for piece in pieces[rank() :: world_size()]
        for start in range(piece * size, min((piece + 1) * size, count), batch_size)
    ]
    batches = ([(0, i) for i in range(start, min(start + batch_size, count))] for start in starts)
    loaded = load_views(images, make_views, batches, cfg.DATA.NUM_WORKERS)
    if rank() == 0:
        loaded = progress(loaded, f"features, batches of {batch_size}", len(starts))
    rows: list[np.ndarray] = []
    for batch in loaded:
        features = [frozen.features(batch.views[:, view]) for view in range(len(views))]
        rows.append(torch.stack(features, 1).cpu().numpy())  # (B, V, D)
        last = int(batch.instances[-1])
        if (last + 1) % size == 0 or last + 1 == count:
            yield last // size, np.concatenate(rows)
            rows = []
