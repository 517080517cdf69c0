"""Batches of views: which images in which order, read, augmented and brought to the encoder.

Order and views are pure functions of (seed, epoch, index, view). A batch is requested by its step,
so a run starts at any step without touching what came before, and neither the number of workers
nor of ranks changes what is seen.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from kscl.data.bad_images import (
    MOST_REPLACEMENTS,
    BadImages,
    check_some_image_reads,
    replacement,
)
from kscl.data.formats import MAX_PIXELS, Decoded, UnreadableImage
from kscl.data.source import ImageSource, read_decoded
from kscl.data.tar import RemoteShards
from kscl.errors import KsclError
from kscl.methods.keys import method_of
from kscl.registry import import_modules
from kscl.rng import Stream, permutation, uniforms
from kscl.runtime.processes import obey_parent_alone, start_method
from kscl.views.augment import LateStep, Op, draws_per_view, make_views, resolve, sample_boxes
from kscl.views.batch import Batch, SmallViews
from kscl.views.device import first_on_device, gather
from kscl.views.normalize import normalize_planes
from kscl.views.recipes import with_scale
from kscl.views.sizes import Sizes, size_at

EpochIndex = tuple[int, int]  # epoch, and index of the image


class _Part(NamedTuple):
    """Views of one recipe that draw their numbers from one stream, one after the other."""

    stream: Stream
    numbers: slice  # in the stream
    ops: list[Op]
    views: slice  # in the tensor of views of this size
    small: bool
    late_from: int | None  # the first op that is left to the device


class KeptPictures:
    """Decoded pictures of a small set by index, so that each is decoded once per run.

    Only a set that fits as a whole is kept: with a new order in every epoch, a partial cache would
    rarely help. The workers of a loader share the room.
    """

    def __init__(self, num_images: int, megabytes: float) -> None:
        self.num_images = num_images
        self.room = megabytes * 2**20
        self.pictures: dict[int, Decoded] = {}
        self._bytes = 0

    def keep(self, index: int, image: Decoded) -> None:
        """Keep the picture if, going by what was seen so far, those of the whole set fit."""
        total = self._bytes + image.picture.nbytes
        worker = get_worker_info()
        room = self.room / (1 if worker is None else worker.num_workers)
        if max(total, total / (len(self.pictures) + 1) * self.num_images) <= room:
            self.pictures[index] = image
            self._bytes = total


@dataclass(eq=False)
class ViewDataset(Dataset[Batch]):
    """Images by (epoch, index), each decoded once and turned into views.

    The first `num_queries` of the `num_views` full-size views are queries. The others are keys,
    which have a recipe of their own if `key_ops` is given.
    """

    source: ImageSource
    ops: Sequence[dict[str, Any]]
    num_views: int
    size: Sizes
    seed: int
    mean_std: tuple[Sequence[float], Sequence[float]] | None = None  # None: uint8, not normalized
    max_pixels: int = MAX_PIXELS
    _: KW_ONLY
    num_queries: int = 1
    key_ops: Sequence[dict[str, Any]] | None = None
    small: SmallViews | None = None
    reduced_decode: bool = False
    keep_megabytes: float = 0
    on_device: bool = False  # leave what has a device form to the device; views are then uint8

    def __post_init__(self) -> None:
        # A reduced picture serves the crops of one epoch only.
        keep = 0 if self.reduced_decode else self.keep_megabytes
        self.kept = KeptPictures(len(self.source), keep)
        self.num_numbers: dict[Stream, int] = {}  # of an image
        self.parts: list[_Part] = []
        keys = self.ops if self.key_ops is None else self.key_ops
        self._add(Stream.VIEWS, self.ops, 0, 1)
        self._add(Stream.VIEWS, keys, self.num_queries, self.num_views)
        self._add(Stream.MORE_QUERIES, self.ops, 1, self.num_queries)
        if self.small is not None:
            crops = with_scale(self.ops, self.small.scale)
            self._add(Stream.SMALL_QUERIES, crops, 0, self.small.count, small=True)

    def _add(
        self,
        stream: Stream,
        recipe: Sequence[dict[str, Any]],
        first: int,
        end: int,
        small: bool = False,
    ) -> None:
        if first < end:
            ops, used = resolve(recipe), self.num_numbers.get(stream, 0)
            self.num_numbers[stream] = used + (end - first) * draws_per_view(ops)
            numbers = slice(used, self.num_numbers[stream])
            late_from = first_on_device(ops) if self.on_device else None
            self.parts.append(_Part(stream, numbers, ops, slice(first, end), small, late_from))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, wanted: EpochIndex) -> Batch:
        return self.__getitems__([wanted])

    def __getitems__(self, wanted: list[EpochIndex]) -> Batch:
        """Return one batch; an image that cannot be read is replaced by another."""
        views, small = self.new_tensors(len(wanted), epoch=wanted[0][0])
        shown, bad = [], []
        late: list[LateStep] = []
        small_late: list[LateStep] = []
        for row, epoch_index in enumerate(wanted):
            image, index, met = self.read_picture(*epoch_index)
            for is_small, step in self.fill(image, epoch_index, views, small, row):
                (small_late if is_small else late).append(step)
            shown.append(index)
            bad.extend(met)
        return Batch(views, torch.tensor(shown), bad, small, gather(late), gather(small_late))

    def new_tensors(self, batch: int, epoch: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return room for the views of a batch: (B, V, 3, H, W), and (B, S, 3, h, w) or None."""
        dtype = torch.float32 if self.mean_std else torch.uint8
        size = size_at(self.size, epoch)
        views = _new_tensor((batch, self.num_views, 3, size, size), dtype)
        if self.small is None:
            return views, None
        shape = (batch, self.small.count, 3, self.small.size, self.small.size)
        return views, _new_tensor(shape, dtype)

    def fill(
        self,
        image: Decoded,
        epoch_index: EpochIndex,
        views: torch.Tensor,
        small: torch.Tensor | None,
        row: int = 0,
    ) -> list[tuple[bool, LateStep]]:
        """Write the views of one decoded image into its row of (B, V, 3, H, W) and (B, S, 3, h, w).

        Return the steps that are left to the device, and whether each is of a small view.
        """
        late = []
        whole = image.height, image.width
        for part, numbers in self._numbers(epoch_index):
            tensor = small if part.small else views
            assert tensor is not None
            target = tensor[row].numpy()[part.views]
            made = target if self.mean_std is None else np.empty(target.shape, np.uint8)
            left = make_views(
                image.picture, part.ops, target.shape[-1], numbers, made, whole, part.late_from
            )
            if self.mean_std is not None:
                normalize_planes(made, *self.mean_std, target)
            first = row * tensor.shape[1] + part.views.start
            late += [(part.small, step._replace(view=first + step.view)) for step in left]
        return late

    def _numbers(self, epoch_index: EpochIndex) -> Iterator[tuple[_Part, np.ndarray]]:
        """Yield the random numbers of each part."""
        epoch, index = epoch_index
        drawn = {
            stream: uniforms(self.seed, epoch, stream, index, count)
            for stream, count in self.num_numbers.items()
        }
        for part in self.parts:
            yield part, drawn[part.stream][part.numbers]

    def _reduction(self, epoch_index: EpochIndex, height: int, width: int) -> int:
        """Return by what an image can be reduced so that no crop has to grow because of it."""
        room = float("inf")
        for part, numbers in self._numbers(epoch_index):
            small = self.small if part.small else None
            size = small.size if small else size_at(self.size, epoch_index[0])
            if min(height, width) < 2 * size:
                return 1  # without drawing any crop
            for box in sample_boxes(part.ops, height, width, size, numbers):
                room = min(room, box.height / size, box.width / size)
        return next((by for by in (8, 4, 2) if room >= by), 1)

    def read_picture(self, epoch: int, index: int) -> tuple[Decoded, int, list[tuple[int, str]]]:
        """Return the image or its first readable replacement, its index, and what was bad."""
        bad: list[tuple[int, str]] = []
        reduction = partial(self._reduction, (epoch, index)) if self.reduced_decode else None
        shown = index
        for attempt in range(MOST_REPLACEMENTS):
            if (kept := self.kept.pictures.get(shown)) is not None:
                return kept, shown, bad
            try:
                image = read_decoded(self.source, shown, self.max_pixels, reduction)
            except UnreadableImage as error:
                bad.append((shown, str(error)))
            else:
                self.kept.keep(shown, image)
                return image, shown, bad
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


def epoch_order(
    seed: int, epoch: int, num_images: int, source: ImageSource | None = None
) -> np.ndarray:
    """Return the order in which an epoch shows the images; remote shards have their own."""
    if isinstance(source, RemoteShards):
        return source.epoch_order(seed, epoch)
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
                order = epoch_order(self.seed, epoch, self.num_images, self.source)
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

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.batches)
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.seconds_waited += time.perf_counter() - start
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
    views, mean_std = method_of(cfg).views(cfg), (tuple(cfg.INPUT.MEAN), tuple(cfg.INPUT.STD))
    check_some_image_reads(source, cfg.SEED, cfg.DATA.MAX_PIXELS)
    dataset = ViewDataset(
        source,
        views.recipe,
        views.count,
        cfg.INPUT.SIZE,
        cfg.SEED,
        None if cfg.DATA.NORMALIZE_ON_DEVICE or cfg.VIEWS.DEVICE else mean_std,
        cfg.DATA.MAX_PIXELS,
        num_queries=views.first,
        key_ops=views.others,
        small=views.small,
        reduced_decode=cfg.DATA.REDUCED_DECODE,
        keep_megabytes=cfg.DATA.KEEP_MEGABYTES,
        on_device=cfg.VIEWS.DEVICE,
    )
    steps = (first_step, last_step, rank, world_size)
    sampler = StepSampler(len(source), cfg.SOLVER.BATCH_SIZE, cfg.SEED, *steps, source=source)
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
    # Zero, not one: with one, OpenCV waits for the threads of its pool, which a fork does not copy.
    cv2.setNumThreads(0)
    obey_parent_alone()
    import_modules()  # plug-ins, which a spawned worker has not imported yet


@dataclass(frozen=True)
class Budget:
    """Images per second: decode and augment on one core, encode on all devices of the process."""

    decode: float
    augment: float
    workers: int
    encode: float | None = None

    @property
    def load(self) -> float:
        """Images per second that the workers deliver together, if each has a core."""
        return max(1, self.workers) / (1 / self.decode + 1 / self.augment)

    @property
    def held_back_by(self) -> str:
        """The slowest stage."""
        if self.encode is not None and self.encode <= self.load:
            return "encode"
        return "decode" if self.decode < self.augment else "augment"

    def with_encode(self, images_per_second: float) -> Budget:
        """Return the same budget with a measured encoder."""
        return replace(self, encode=images_per_second)

    def __str__(self) -> str:
        rates = [f"decode {self.decode:.0f}", f"augment {self.augment:.0f}"]
        if self.encode is not None:
            rates.append(f"encode {self.encode:.0f}")
        return (
            f"images/s: {', '.join(rates)}; {self.workers} workers load {self.load:.0f}; "
            f"{self.held_back_by} holds the run back"
        )


def measure_budget(dataset: ViewDataset, workers: int, num_images: int = 16) -> Budget:
    """Time decoding and augmenting of a few images on one core, as a worker would do it."""
    threads = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(1)
    cv2.setNumThreads(0)  # no threads of its own, as in a worker
    views, small = dataset.new_tensors(1)
    seconds = []
    try:
        order = epoch_order(dataset.seed, 0, len(dataset), dataset.source)
        for index in order[:num_images].tolist():
            start = time.perf_counter()
            image, _, _ = dataset.read_picture(0, index)
            decoded = time.perf_counter()
            dataset.fill(image, (0, index), views, small)
            seconds.append((decoded - start, time.perf_counter() - decoded))
    finally:
        torch.set_num_threads(threads[0])
        cv2.setNumThreads(threads[1])
    decode, augment = np.median(seconds, axis=0).tolist()
    return Budget(1 / decode, 1 / augment, workers)
