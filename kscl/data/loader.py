"""Batches of views: which images in which order, read, augmented and brought to the encoder.

Order and views are pure functions of (seed, epoch, index, view). A batch is asked for by its step,
so a run starts at any step without touching what came before, and neither the number of workers
nor of ranks changes what is seen.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from kscl.data.bad_images import BadImages, check_some_image_reads
from kscl.data.source import ImageSource
from kscl.data.tar import RemoteShards
from kscl.data.view_dataset import Batch, EpochIndex, SmallViews, ViewDataset
from kscl.errors import KsclError
from kscl.rng import Stream, permutation
from kscl.runtime.processes.workers import obey_parent_alone, start_method


def epoch_order(seed: int, epoch: int, num_images: int) -> np.ndarray:
    """Return the order in which an epoch shows the images."""
    return permutation(seed, epoch, Stream.ORDER, num_images)


def order_of(source: ImageSource, seed: int, epoch: int) -> np.ndarray:
    """Return the order in which an epoch shows the images of a source."""
    if isinstance(source, RemoteShards):
        return source.epoch_order(seed, epoch)
    return epoch_order(seed, epoch, len(source))


def steps_per_epoch(num_images: int, batch_size: int) -> int:
    """Count whole batches: what is left over changes from epoch to epoch with the order."""
    steps = num_images // batch_size
    if not steps:
        raise KsclError(
            f"SOLVER.BATCH_SIZE is {batch_size} but there are only {num_images} images, so an "
            "epoch would have no step. Make the batch smaller."
        )
    return steps


@dataclass(eq=False)
class StepSampler:
    """Yield one rank's part of every batch from `first_step` up to `last_step`, over all epochs.

    The ranks hold consecutive parts of the global batch, so that joined in the order of ranks
    they give the batch of a single rank. Pretraining drops the last batch of an epoch if it is
    smaller, as its loss depends on the size; a probe shows every image (`drop_last` False), and
    its ranks' parts may differ by one image.
    """

    num_images: int
    batch_size: int
    seed: int
    first_step: int
    last_step: int
    rank: int = 0
    world_size: int = 1
    _: KW_ONLY
    drop_last: bool = True
    source: ImageSource | None = None  # if it has an order of its own

    def __post_init__(self) -> None:
        if self.drop_last and self.batch_size % self.world_size:
            raise KsclError(
                f"SOLVER.BATCH_SIZE is {self.batch_size}, which {self.world_size} processes cannot "
                "share evenly. Choose a multiple."
            )
        self.steps_per_epoch = (
            steps_per_epoch(self.num_images, self.batch_size)
            if self.drop_last
            else -(-self.num_images // self.batch_size)
        )

    def __len__(self) -> int:
        return self.last_step - self.first_step

    def __iter__(self) -> Iterator[list[EpochIndex]]:
        known_epoch, order = -1, np.empty(0, np.int64)
        for step in range(self.first_step, self.last_step):
            epoch, number = divmod(step, self.steps_per_epoch)
            if epoch != known_epoch:
                known_epoch = epoch
                order = (
                    epoch_order(self.seed, epoch, self.num_images)
                    if self.source is None
                    else order_of(self.source, self.seed, epoch)
                )
            batch = order[number * self.batch_size : (number + 1) * self.batch_size].tolist()
            first, end = (r * len(batch) // self.world_size for r in (self.rank, self.rank + 1))
            yield [(epoch, index) for index in batch[first:end]]


@dataclass(eq=False)
class TrainLoader:
    """The batches of a run in order; counts bad images and the time waited."""

    batches: DataLoader[Batch]
    dataset: ViewDataset
    bad_images: BadImages
    seconds_waited: float = 0.0

    @property
    def source(self) -> ImageSource:
        """Where the images come from."""
        return self.dataset.source

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps per epoch."""
        sampler = self.batches.batch_sampler
        assert isinstance(sampler, StepSampler)
        return sampler.steps_per_epoch

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.batches)
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            self.seconds_waited += time.perf_counter() - asked
            if batch is None:
                return
            self.bad_images.note(batch.bad)
            yield batch


def build_train_loader(
    cfg: Any,
    source: ImageSource,
    *,
    last_step: int,
    first_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> TrainLoader:
    """Return the batches of steps first_step … last_step - 1 as this rank sees them."""
    small, mean_std = cfg.VIEWS.SMALL, (tuple(cfg.INPUT.MEAN), tuple(cfg.INPUT.STD))
    check_some_image_reads(source, cfg.SEED, cfg.DATA.MAX_PIXELS)
    dataset = ViewDataset(
        source,
        cfg.AUGMENT,
        cfg.METHOD.NUM_QUERIES + cfg.METHOD.NUM_SHOTS,
        cfg.INPUT.SIZE,
        cfg.SEED,
        None if cfg.DATA.NORMALIZE_ON_DEVICE else mean_std,
        cfg.DATA.MAX_PIXELS,
        num_queries=cfg.METHOD.NUM_QUERIES,
        key_ops=key_recipe(cfg),
        small=SmallViews(small.COUNT, small.SIZE, tuple(small.SCALE)) if small.COUNT else None,
        reduced_decode=cfg.DATA.REDUCED_DECODE,
        keep_megabytes=cfg.DATA.KEEP_MEGABYTES,
    )
    steps = (first_step, last_step, rank, world_size)
    sampler = StepSampler(len(source), cfg.SOLVER.BATCH_SIZE, cfg.SEED, *steps, source=source)
    bad = BadImages(source, cfg.DATA.BAD_IMAGES, cfg.DATA.MAX_BAD_FRACTION)
    return TrainLoader(load_in_workers(dataset, sampler, cfg.DATA.NUM_WORKERS), dataset, bad)


def key_recipe(cfg: Any) -> Any:
    """Return the augmentations of the keys: their own, or those of the queries."""
    return cfg.AUGMENT if cfg.AUGMENT_KEYS is None else cfg.AUGMENT_KEYS


def load_in_workers(
    dataset: Dataset[Any], batches: Iterable[list[EpochIndex]], num_workers: int
) -> DataLoader[Any]:
    """Return the batches of a data set in order, made by workers of one thread each."""
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        worker_init_fn=_set_up_worker,
        multiprocessing_context=start_method(num_workers),
        pin_memory=torch.cuda.is_available(),
        # Its own generator: the loader must not draw from the stream that training draws from.
        generator=torch.Generator(),
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _set_up_worker(worker: int) -> None:
    # Zero, not one: with one, OpenCV waits for the threads of its pool, which a fork of a process
    # that has used them does not copy. With zero it never asks the pool.
    cv2.setNumThreads(0)
    obey_parent_alone()
