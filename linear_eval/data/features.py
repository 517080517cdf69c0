"""Features of fixed views, computed once and kept on disk.

    <cache>/features/<key>/about.json       what the key was made from
                           features.f32     one slot a view, (N, D) float32 each; mapped, not read
                           centre.json      this view's slot is complete; its checksum

The key covers the backbone's tensors, the images and all that lies between the two, so features are
taken again when nothing has changed and never otherwise. An interrupted extraction goes on with the
first missing piece; the pieces are the same for any number of ranks.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from torch import Tensor

from kscl.data.index_cache import cache_folder
from kscl.records.provenance import library_versions
from kscl.runtime.distributed import rank, world_size
from kscl.runtime.files import write_atomically
from kscl.runtime.launch import any_rank, on_first_rank
from kscl.runtime.logs import LOGGER, progress
from kscl.runtime.signals import StopRequest
from linear_eval.backbone import Frozen
from linear_eval.checkpoint import leave_if_asked
from linear_eval.data.images import LabelledImages, Place, ViewsOfImages, file_state, load_batches
from linear_eval.data.views import Geometry, slot
from linear_eval.errors import LinearEvalError

FORMAT = 1
BATCH = 128  # images the backbone sees at a time
PIECE = 16 * BATCH  # images between two markers on disk
LIBRARIES = ("torch", "torchvision", "timm", "numpy")
FILE = "features.f32"
log = logging.getLogger(LOGGER)


@dataclass(frozen=True)
class Features:
    """Image i as seen in a view is row `slot(view) · count + i`."""

    rows: Tensor  # (slots · N, D), float32, mapped from the file
    count: int  # N

    def of_view(self, view: str) -> Tensor:
        """(N, D)"""
        return self.rows[slot(view) * self.count : (slot(view) + 1) * self.count]


@dataclass(frozen=True)
class _Store:
    """One folder of the cache."""

    folder: Path
    count: int
    dim: int

    def slot_bytes(self) -> int:
        return self.count * self.dim * 4

    def pieces(self) -> range:
        return range(-(-self.count // PIECE))

    def marker(self, view: str, piece: int) -> Path:
        return self.folder / f"{view}.{piece:06d}.done"

    def seal(self, view: str) -> Path:
        return self.folder / f"{view}.json"

    def checksum(self, view: str) -> str:
        digest, left = hashlib.sha256(), self.slot_bytes()
        with (self.folder / FILE).open("rb") as file:
            file.seek(slot(view) * self.slot_bytes())
            while left and (part := file.read(min(left, 2**24))):
                digest.update(part)
                left -= len(part)
        return digest.hexdigest()

    def is_complete(self, view: str) -> bool:
        try:
            sealed = json.loads(self.seal(view).read_text())["sha256"]
            good = sealed == self.checksum(view)
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError):
            good = False
        if not good:
            log.warning("%s: the features of view %s are damaged and made anew", self.folder, view)
            self.forget(view)
        return good

    def forget(self, view: str) -> None:
        self.seal(view).unlink(missing_ok=True)
        for piece in self.pieces():
            self.marker(view, piece).unlink(missing_ok=True)

    def reserve(self, view: str) -> None:
        """Take the disk space now, so that a full disk is told before hours of work."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / FILE).open("ab") as file:
            try:
                os.posix_fallocate(file.fileno(), slot(view) * self.slot_bytes(), self.slot_bytes())
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                    raise
                raise LinearEvalError(
                    f"{self.folder}: the disk has no room for {self.slot_bytes():,} bytes of "
                    "features; make room, or set DATA.CACHE_DIR to another disk"
                ) from error

    def write(self, view: str, piece: int, rows: np.ndarray) -> None:
        start = slot(view) * self.slot_bytes() + piece * PIECE * self.dim * 4
        with (self.folder / FILE).open("r+b") as file:
            file.seek(start)
            file.write(rows.tobytes())
            file.flush()
            os.fsync(file.fileno())
        self.marker(view, piece).touch()

    def finish(self, views: Sequence[str]) -> None:
        """Seal the views' slots; all their pieces must be there."""
        markers = [self.marker(view, piece) for view in views for piece in self.pieces()]
        sealed = all(self.seal(view).exists() for view in views)  # by another run, meanwhile
        if not sealed and not all(marker.exists() for marker in markers):
            raise LinearEvalError(
                f"{self.folder}: pieces of the features are missing that other processes wrote: "
                "DATA.CACHE_DIR must be a folder that all machines share"
            )
        for view in views:
            content = json.dumps({"sha256": self.checksum(view)})
            write_atomically(self.seal(view), content.encode())
        for marker in markers:
            marker.unlink(missing_ok=True)

    def open(self, views: Sequence[str]) -> Features:
        slots = 1 + max(slot(view) for view in views)
        # Copy-on-write: torch wants memory that could be written, and nobody writes it.
        mapped = np.memmap(
            self.folder / FILE, np.float32, mode="c", shape=(slots * self.count, self.dim)
        )
        return Features(torch.from_numpy(mapped), self.count)


def cached_features(
    frozen: Frozen,
    images: LabelledImages,
    views: Sequence[str],
    shape: Geometry,
    *,
    cache_dir: str,
    num_workers: int,
    stop: StopRequest,
) -> Features:
    """The features of these views of the images, from the cache where they are in it."""
    about = on_first_rank(lambda: _about(frozen, images, shape))
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
    store = _Store(cache_folder(cache_dir) / "features" / name, len(images), frozen.dim)
    missing = on_first_rank(lambda: [view for view in views if not store.is_complete(view)])
    where = images.source.where
    if not missing:
        log.info("features of %s: taken from %s", where, store.folder)
        return store.open(views)

    def prepare() -> list[int]:
        for view in missing:
            store.reserve(view)
        write_atomically(store.folder / "about.json", json.dumps(about, indent=2).encode())
        return [
            piece
            for piece in store.pieces()
            if not all(store.marker(view, piece).exists() for view in missing)
        ]

    pieces = on_first_rank(prepare)
    log.info("features of %s: %s into %s", where, " and ".join(missing), store.folder)
    for piece, rows in _extract(frozen, images, missing, shape, pieces, num_workers):
        for number, view in enumerate(missing):
            store.write(view, piece, rows[:, number])
        leave_if_asked(stop)
    any_rank(False)  # all ranks have written
    on_first_rank(lambda: store.finish(missing))
    return store.open(views)


def _about(frozen: Frozen, images: LabelledImages, shape: Geometry) -> dict[str, Any]:
    description = frozen.loaded.description
    versions = library_versions()
    return {
        "format": FORMAT,
        "backbone": frozen.tensors_sha256,
        "arch": [description.arch, description.kwargs],
        "precision": str(frozen.amp or torch.float32),
        "mean": frozen.mean.flatten().tolist(),
        "std": frozen.std.flatten().tolist(),
        "device": frozen.device.type,
        "data": images.fingerprint["hash"],
        "files": file_state(images),
        "views": asdict(shape),
        "libraries": {name: versions[name] for name in LIBRARIES} | {"pillow": PIL.__version__},
    }


def _extract(
    frozen: Frozen,
    images: LabelledImages,
    views: Sequence[str],
    shape: Geometry,
    pieces: Sequence[int],
    num_workers: int,
) -> Iterator[tuple[int, np.ndarray]]:
    """(piece, rows (n, V, D)) of this rank's share of the pieces."""

    def make_views(picture: Any, epoch: int, number: int) -> list[Any]:
        return [shape.fixed(picture, view, number) for view in views]

    mine = pieces[rank() :: world_size()]
    batches = (batch for piece in mine for batch in _batches(piece, len(images)))
    loaded = load_batches(ViewsOfImages(images, make_views), batches, num_workers)
    if rank() == 0:
        total = sum(1 for piece in mine for _ in _starts(piece, len(images)))
        loaded = progress(loaded, f"features, batches of {BATCH}", total)
    rows: list[np.ndarray] = []
    for batch in loaded:
        features = [frozen.features(batch.views[:, view]) for view in range(len(views))]
        stacked = torch.stack(features, 1)  # (B, V, D)
        frozen.check_finite(stacked)
        rows.append(stacked.cpu().numpy())
        last = int(batch.places[-1])
        if (last + 1) % PIECE == 0 or last + 1 == len(images):
            yield last // PIECE, np.concatenate(rows)
            rows = []


def _starts(piece: int, count: int) -> range:
    """Where the batches of a piece begin."""
    return range(piece * PIECE, min((piece + 1) * PIECE, count), BATCH)


def _batches(piece: int, count: int) -> Iterator[list[Place]]:
    for start in _starts(piece, count):
        yield [(0, place) for place in range(start, min(start + BATCH, count))]
