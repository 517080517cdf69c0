"""Training batches as a pure function of (seed, iteration, rank).

Detectron2 saves neither the sampler's position nor its random state, so a resumed run would see
other images and crops. Here the order is Detectron2's own, replayed without reading images, and the
random numbers of a batch are seeded by its number.
"""

from __future__ import annotations

import functools
import itertools
import logging
import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetFromList, DatasetMapper, MapDataset
from detectron2.data.build import trivial_batch_collator
from detectron2.data.common import AspectRatioGroupedDataset
from detectron2.data.samplers import InferenceSampler, TrainingSampler
from detectron2.utils import comm
from torch.utils.data import DataLoader, Dataset

from kscl.backbone_file.read import some
from kscl.data.bad_images import MOST_REPLACEMENTS, replacement
from kscl.errors import KsclError
from kscl.runtime.processes import obey_parent_alone, start_method

Numbered = tuple[int, list[int]]  # (iteration, indices of its images)
BAD_IMAGES = "bad_images"  # key of a mapped image: the unreadable ones it replaces, with reasons

log = logging.getLogger(__name__)


def seed_of(*parts: int | str) -> int:
    """Return a 32-bit seed from the parts that identify a random stream."""
    return zlib.crc32("/".join(map(str, parts)).encode())


def seed_everything(*parts: int | str) -> None:
    """Seed the generators of Python, numpy and torch."""
    seed = seed_of(*parts)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _order(sizes: list[tuple[int, int]], batch: int, seed: int, start: int) -> Iterator[Numbered]:
    """Return the images of this rank's batches, from iteration `start` on."""
    stream = (
        {"index": index, "width": sizes[index][0], "height": sizes[index][1]}
        for index in TrainingSampler(len(sizes), seed=seed)
    )
    batches = AspectRatioGroupedDataset(stream, batch)  # does not mix wide and tall images
    grouped = ([image["index"] for image in batch] for batch in batches)
    return itertools.islice(enumerate(grouped), start, None)


class _Batches(Dataset[list[dict[str, Any]]]):
    """The mapped images of a numbered batch."""

    def __init__(self, dicts: list[dict[str, Any]], mapper: DatasetMapper, seed: int) -> None:
        self.dicts = DatasetFromList(dicts, copy=False)  # serialized: workers share one copy
        self.mapper, self.seed = mapper, seed

    def __getitem__(self, numbered: Any) -> list[dict[str, Any]]:
        iteration, indices = numbered
        batch = []
        for number, index in enumerate(indices):
            # Detectron2's augmentations draw from numpy's global generator only.
            np.random.seed(seed_of(self.seed, "image", iteration, comm.get_rank(), number))
            batch.append(self._mapped(index, iteration))
        return batch

    def _mapped(self, index: int, iteration: int) -> dict[str, Any]:
        """Return an image, or another one if it cannot be read, with what it replaces."""
        bad: dict[str, str] = {}
        for attempt in range(MOST_REPLACEMENTS):
            image = self.dicts[index]
            try:
                return {**self.mapper(image), BAD_IMAGES: bad}
            except OSError as error:
                bad[image["file_name"]] = str(error)
                index = replacement(self.seed, iteration, index, attempt, len(self.dicts))
        raise KsclError(f"{len(bad)} images in a row cannot be read: {some(list(bad))}.")


def _noted(
    loader: DataLoader[Any], known: dict[str, str], most: float
) -> Iterator[list[dict[str, Any]]]:
    """Yield the batches; add unreadable images to `known`, up to `most`."""
    for batch in loader:
        bad = {name: why for image in batch for name, why in image.pop(BAD_IMAGES).items()}
        for name, why in bad.items():
            if name in known:
                continue
            known[name] = why
            log.warning("%s cannot be read and is replaced by another image: %s.", name, why)
            if len(known) > most:
                raise KsclError(
                    f"{len(known)} training images cannot be read, e.g. {name}: more than "
                    "KSCL.MAX_BAD_FRACTION allows. Replace them, or remove them from the split; "
                    "kscl preflight --full lists them."
                )
        yield batch


def build_train_loader(
    cfg: CfgNode,
    dicts: list[dict[str, Any]],
    seed: int,
    workers: int,
    start: int = 0,
    bad_images: dict[str, str] | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """Return this rank's endless batches from iteration `start` on.

    Unreadable images are added to `bad_images`.
    """
    world, total = comm.get_world_size(), cfg.SOLVER.IMS_PER_BATCH
    if total % world:
        raise KsclError(
            f"SOLVER.IMS_PER_BATCH must be a multiple of the {world} processes, got {total}."
        )
    if not cfg.DATALOADER.ASPECT_RATIO_GROUPING:
        sizes = [(1, 1)] * len(dicts)
    else:
        sizes = [(image["width"], image["height"]) for image in dicts]
    known = {} if bad_images is None else bad_images
    most = cfg.KSCL.MAX_BAD_FRACTION * (len(dicts) + len(known))
    loader = DataLoader(
        _Batches(dicts, DatasetMapper(cfg, is_train=True), seed),
        batch_size=None,
        sampler=_order(sizes, total // world, seed_of(seed, "order"), start),
        num_workers=workers,
        collate_fn=trivial_batch_collator,
        worker_init_fn=_set_up_worker,
        multiprocessing_context=start_method(workers),
        # A loader draws a number when it starts; from the global generator, resuming would differ.
        generator=torch.Generator().manual_seed(seed_of(seed, "loader")),
    )
    return _noted(loader, known, most)


def _set_up_worker(worker: int) -> None:
    obey_parent_alone()


def _test_image(mapper: DatasetMapper, image: dict[str, Any]) -> dict[str, Any]:
    try:
        return mapper(image)
    except OSError as error:
        raise KsclError(
            f"The test image {image['file_name']} cannot be read: {error}. If it broke during the "
            "run, restore it and continue with --resume. If it was broken before, replace it and "
            "train in a new OUTPUT_DIR, since the data changed; kscl preflight --full lists all "
            "such files."
        ) from error


def build_test_loader(cfg: CfgNode, dicts: list[dict[str, Any]]) -> DataLoader[Any]:
    """Return this rank's test images one by one, as Detectron2's own loader does."""
    mapped = functools.partial(_test_image, DatasetMapper(cfg, is_train=False))
    images = MapDataset(DatasetFromList(dicts, copy=False), mapped)
    return DataLoader(
        images,
        batch_size=1,
        sampler=InferenceSampler(len(images)),
        num_workers=cfg.DATALOADER.NUM_WORKERS,
        collate_fn=trivial_batch_collator,
        worker_init_fn=_set_up_worker,
        multiprocessing_context=start_method(cfg.DATALOADER.NUM_WORKERS),
    )
