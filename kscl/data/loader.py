"""Batches of views: which images in which order, read, augmented and brought to the encoder.

Order and views are pure functions of (seed, epoch, index, view). A batch is asked for by its step,
so a run starts at any step without touching what came before, and neither the number of workers
nor of ranks changes what is seen.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from kscl.data.bad_images import MOST_REPLACEMENTS, BadImages, check_some_image_reads, replacement
from kscl.data.decode import read_picture
from kscl.data.formats import MAX_PIXELS, UnreadableImage
from kscl.data.source import ImageSource
from kscl.errors import KsclError
from kscl.rng import Stream, permutation, uniforms
from kscl.runtime.lifetime import end_with_parent
from kscl.views.augment import make_views, numbers_needed
from kscl.views.normalize import normalize_planes
from kscl.views.recipes import check_recipe, with_defaults

EpochIndex = tuple[int, int]  # epoch, and index of the image


class Batch(NamedTuple):
    """What the encoder gets, and what was met on the way."""

    views: torch.Tensor  # (B, V, 3, H, W), in pretraining view 0 is the query; uint8 or float32
    instances: torch.Tensor  # (B,) int64, the index of the image shown
    bad: list[tuple[int, str]]  # index of each unreadable image met, and the reason


def epoch_order(seed: int, epoch: int, num_images: int) -> np.ndarray:
    """Return the order in which an epoch shows the images."""
    return permutation(seed, epoch, Stream.ORDER, num_images)


def steps_per_epoch(num_images: int, batch_size: int) -> int:
    """Count whole batches: what is left over changes from epoch to epoch with the order."""
    steps = num_images // batch_size
    if not steps:
        raise KsclError(
            f"SOLVER.BATCH_SIZE is {batch_size} but there are only {num_images} images, so an "
            "epoch would have no step. Make the batch smaller."
        )
    return steps


class StepSampler:
    """Yield one rank's part of every batch from `first_step` up to `last_step`, over all epochs.

    The ranks hold consecutive parts of the global batch, so that joined in the order of ranks
    they give the batch of a single rank. Pretraining drops the last batch of an epoch if it is
    smaller, as its loss depends on the size; a probe shows every image (`drop_last` False), and
    its ranks' parts may differ by one image.
    """

    def __init__(
        self,
        num_images: int,
        batch_size: int,
        seed: int,
        first_step: int,
        last_step: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        drop_last: bool = True,
    ) -> None:
        if drop_last and batch_size % world_size:
            raise KsclError(
                f"SOLVER.BATCH_SIZE is {batch_size}, which {world_size} processes cannot share "
                "evenly. Choose a multiple."
            )
        self.num_images = num_images
        self.batch_size = batch_size
        self.seed = seed
        self.steps = range(first_step, last_step)
        self.rank, self.world_size = rank, world_size
        whole, rest = divmod(num_images, batch_size)
        self.steps_per_epoch = (
            steps_per_epoch(num_images, batch_size) if drop_last else whole + bool(rest)
        )

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[EpochIndex]]:
        known_epoch, order = -1, np.empty(0, np.int64)
        for step in self.steps:
            epoch, number = divmod(step, self.steps_per_epoch)
            if epoch != known_epoch:
                known_epoch, order = epoch, epoch_order(self.seed, epoch, self.num_images)
            batch = order[number * self.batch_size : (number + 1) * self.batch_size].tolist()
            first, end = (r * len(batch) // self.world_size for r in (self.rank, self.rank + 1))
            yield [(epoch, index) for index in batch[first:end]]


class ViewDataset(Dataset[Batch]):
    """Images by (epoch, index), each decoded once and turned into `num_views` views."""

    def __init__(
        self,
        source: ImageSource,
        ops: Sequence[dict[str, Any]],
        num_views: int,
        size: int,
        seed: int,
        mean_std: tuple[Sequence[float], Sequence[float]] | None = None,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.source = source
        self.ops = with_defaults(ops)
        self.num_views = num_views
        self.size = size
        self.seed = seed
        self.mean_std = mean_std  # given: float32 normalized here; None: uint8
        self.max_pixels = max_pixels
        self.num_numbers = numbers_needed(self.ops, num_views)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, wanted: EpochIndex) -> Batch:
        return self.__getitems__([wanted])

    def __getitems__(self, wanted: list[EpochIndex]) -> Batch:
        """Return one batch; an image that cannot be read is replaced by another."""
        shape = (len(wanted), self.num_views, 3, self.size, self.size)
        views = _new_tensor(shape, torch.float32 if self.mean_std else torch.uint8)
        shown, bad = [], []
        for epoch_index, target in zip(wanted, views.numpy(), strict=True):
            picture, index, met = self.read_picture(*epoch_index)
            self.fill(picture, epoch_index, target)
            shown.append(index)
            bad.extend(met)
        return Batch(views, torch.tensor(shown), bad)

    def fill(self, picture: np.ndarray, epoch_index: EpochIndex, target: np.ndarray) -> None:
        """Write the views of one decoded image into (K + 1, 3, H, W)."""
        epoch, index = epoch_index
        numbers = uniforms(self.seed, epoch, Stream.VIEWS, index, self.num_numbers)
        if self.mean_std is None:
            make_views(picture, self.ops, self.size, numbers, target)
            return
        views = np.empty(target.shape, np.uint8)
        make_views(picture, self.ops, self.size, numbers, views)
        normalize_planes(views, *self.mean_std, target)

    def read_picture(self, epoch: int, index: int) -> tuple[np.ndarray, int, list[tuple[int, str]]]:
        """Return the image or its first readable replacement, its index, and what was bad."""
        bad: list[tuple[int, str]] = []
        shown = index
        for attempt in range(MOST_REPLACEMENTS):
            try:
                return read_picture(self.source, shown, self.max_pixels), shown, bad
            except UnreadableImage as error:
                bad.append((shown, str(error)))
            shown = replacement(self.seed, epoch, index, attempt, len(self.source))
        raise KsclError(
            f"{MOST_REPLACEMENTS} images in a row could not be read from {self.source.where}. "
            f"The last is {self.source.name(bad[-1][0])} ({bad[-1][1]}). Check that the storage "
            "is still there."
        )


def _new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor; in a worker, in memory that the main process sees too."""
    tensor = torch.empty(0, dtype=dtype)
    if get_worker_info() is not None:
        num_bytes = int(np.prod(shape)) * tensor.element_size()
        tensor.set_(torch.UntypedStorage._new_shared(num_bytes))
    return tensor.resize_(shape)


class TrainLoader:
    """The batches of a run in order, with the account of bad images and of the time waited."""

    def __init__(self, batches: DataLoader[Batch], dataset: ViewDataset, bad: BadImages) -> None:
        self.batches = batches
        self.dataset = dataset
        self.bad_images = bad
        self.seconds_waited = 0.0

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
    if problems := check_recipe(cfg.AUGMENT, "AUGMENT"):
        raise KsclError("\n".join(problems))
    max_pixels = cfg.DATA.MAX_PIXELS
    check_some_image_reads(source, cfg.SEED, max_pixels)
    mean_std = (
        None if cfg.DATA.NORMALIZE_ON_DEVICE else (tuple(cfg.INPUT.MEAN), tuple(cfg.INPUT.STD))
    )
    num_views = cfg.METHOD.NUM_SHOTS + 1
    dataset = ViewDataset(
        source, cfg.AUGMENT, num_views, cfg.INPUT.SIZE, cfg.SEED, mean_std, max_pixels
    )
    sampler = StepSampler(
        len(source), cfg.SOLVER.BATCH_SIZE, cfg.SEED, first_step, last_step, rank, world_size
    )
    bad = BadImages(source, cfg.DATA.BAD_IMAGES, cfg.DATA.MAX_BAD_FRACTION)
    return TrainLoader(load_in_workers(dataset, sampler, cfg.DATA.NUM_WORKERS), dataset, bad)


def load_in_workers(
    dataset: Dataset[Any], batches: Iterable[list[EpochIndex]], num_workers: int
) -> DataLoader[Any]:
    """Return the batches of a data set in order, made by workers of one thread each."""
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=num_workers,
        collate_fn=_already_a_batch,
        worker_init_fn=_set_up_worker,
        pin_memory=torch.cuda.is_available(),
        # Its own generator: the loader must not draw from the stream that training draws from.
        generator=torch.Generator(),
    )


def _already_a_batch(batch: Any) -> Any:
    return batch


def _set_up_worker(worker: int) -> None:
    # Zero, not one: with one, OpenCV waits for the threads of its pool, which a fork of a process
    # that has used them does not copy. With zero it never asks the pool.
    cv2.setNumThreads(0)
    end_with_parent()
