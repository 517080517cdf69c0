"""Views of numbered images: each image is read and decoded once, and all its views are made of it.

Every view has random numbers of its own, by (seed, epoch, index, view): more queries or small ones
leave the other views as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from kscl.data.bad_images import MOST_REPLACEMENTS, replacement
from kscl.data.decode import read_decoded
from kscl.data.formats import MAX_PIXELS, Decoded, UnreadableImage
from kscl.data.source import ImageSource
from kscl.errors import KsclError
from kscl.rng import Stream, uniforms
from kscl.views.augment import Op, draws_per_view, make_views, resolve, sample_boxes
from kscl.views.normalize import normalize_planes
from kscl.views.recipes import with_scale
from kscl.views.sizes import Sizes, size_at

EpochIndex = tuple[int, int]  # epoch, and index of the image


class Batch(NamedTuple):
    """What the encoder gets, and what was met on the way."""

    views: torch.Tensor  # (B, V, 3, H, W), in pretraining queries, then keys; uint8 or float32
    instances: torch.Tensor  # (B,) int64, the index of the image shown
    bad: list[tuple[int, str]]  # index of each unreadable image met, and the reason
    small: torch.Tensor | None = None  # (B, S, 3, h, w), more queries


@dataclass(frozen=True)
class SmallViews:
    """Small crops of each image, which are queries as well."""

    count: int
    size: int  # width and height in pixels
    scale: tuple[float, float]  # fraction of the image's area


class _Part(NamedTuple):
    """Views of one recipe that draw their numbers from one stream, one after the other."""

    stream: Stream
    numbers: slice  # in the stream
    ops: list[Op]
    views: slice  # in the tensor of views of this size
    small: bool


class KeptPictures:
    """Decoded pictures of a small set by index, so that each is decoded once per run.

    Only a set that fits as a whole is kept: images come in a new order in every epoch, so in a
    large set nearly every kept picture would wait for most of an epoch. The workers of a loader
    share the room.
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
            self.parts.append(_Part(stream, numbers, ops, slice(first, end), small))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, wanted: EpochIndex) -> Batch:
        return self.__getitems__([wanted])

    def __getitems__(self, wanted: list[EpochIndex]) -> Batch:
        """Return one batch; an image that cannot be read is replaced by another."""
        views, small = self.new_tensors(len(wanted), epoch=wanted[0][0])
        shown, bad = [], []
        for row, epoch_index in enumerate(wanted):
            image, index, met = self.read_picture(*epoch_index)
            into = views[row].numpy(), None if small is None else small[row].numpy()
            self.fill(image, epoch_index, *into)
            shown.append(index)
            bad.extend(met)
        return Batch(views, torch.tensor(shown), bad, small)

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
        views: np.ndarray,
        small: np.ndarray | None = None,
    ) -> None:
        """Write the views of one decoded image into (V, 3, H, W) and (S, 3, h, w)."""
        whole = image.height, image.width
        for part, numbers in self._numbers(epoch_index):
            tensor = small if part.small else views
            assert tensor is not None
            target = tensor[part.views]
            made = target if self.mean_std is None else np.empty(target.shape, np.uint8)
            make_views(image.picture, part.ops, target.shape[-1], numbers, made, whole)
            if self.mean_std is not None:
                normalize_planes(made, *self.mean_std, target)

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
