"""Views of numbered images: each image is read and decoded once, and all its views are made of it.

Every view has random numbers of its own, by (seed, epoch, index, view): more queries or small ones
leave the other views as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from kscl.data.bad_images import MOST_REPLACEMENTS, replacement
from kscl.data.decode import Decoded, read_decoded
from kscl.data.formats import MAX_PIXELS, UnreadableImage
from kscl.data.kept_pictures import KeptPictures
from kscl.data.source import ImageSource
from kscl.errors import KsclError
from kscl.rng import Stream, uniforms
from kscl.views.augment import make_views, numbers_needed, sample_boxes
from kscl.views.normalize import normalize_planes
from kscl.views.recipes import Op, with_defaults, with_scale
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
    ops: list[Op]
    first: int  # index in the tensor of views of this size
    end: int
    small: bool = False


class ViewDataset(Dataset[Batch]):
    """Images by (epoch, index), each decoded once and turned into views.

    Of the `num_views` full-size views the first `num_queries` are queries. The others are keys,
    which have a recipe of their own if `key_ops` is given.
    """

    def __init__(
        self,
        source: ImageSource,
        ops: Sequence[dict[str, Any]],
        num_views: int,
        size: Sizes,
        seed: int,
        mean_std: tuple[Sequence[float], Sequence[float]] | None = None,
        max_pixels: int = MAX_PIXELS,
        *,
        num_queries: int = 1,
        key_ops: Sequence[dict[str, Any]] | None = None,
        small: SmallViews | None = None,
        reduced_decode: bool = False,
        keep_megabytes: float = 0,
    ) -> None:
        self.source = source
        self.num_views = num_views
        self.sizes = size
        self.seed = seed
        self.mean_std = mean_std  # given: float32 normalized here; None: uint8
        self.max_pixels = max_pixels
        self.small = small
        self.reduced_decode = reduced_decode
        # A reduced picture serves the crops of one epoch only.
        self.kept = KeptPictures(len(source), 0 if reduced_decode else keep_megabytes)
        queries = with_defaults(ops)
        keys = queries if key_ops is None else with_defaults(key_ops)
        views = [
            _Part(Stream.VIEWS, queries, 0, 1),
            _Part(Stream.VIEWS, keys, num_queries, num_views),
            _Part(Stream.MORE_QUERIES, queries, 1, num_queries),
        ]
        if small is not None:
            crops = with_scale(queries, small.scale)
            views.append(_Part(Stream.SMALL_QUERIES, crops, 0, small.count, small=True))
        self.parts: list[tuple[_Part, slice]] = []  # with the place of its numbers in the stream
        self.num_numbers: dict[Stream, int] = {}  # of an image
        for part in views:
            if part.first < part.end:
                used = self.num_numbers.get(part.stream, 0)
                end = used + numbers_needed(part.ops, part.end - part.first)
                self.num_numbers[part.stream] = end
                self.parts.append((part, slice(used, end)))

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

    def size_at(self, epoch: int) -> int:
        """Return the size of a full-size view in an epoch."""
        return size_at(self.sizes, epoch)

    def new_tensors(self, batch: int, epoch: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return room for the views of a batch: (B, V, 3, H, W), and (B, S, 3, h, w) or None."""
        dtype = torch.float32 if self.mean_std else torch.uint8
        size = self.size_at(epoch)
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
        for part, numbers in self._numbers(epoch_index):
            target = small if part.small else views
            assert target is not None
            self._fill_part(image, part.ops, numbers, target[part.first : part.end])

    def _numbers(self, epoch_index: EpochIndex) -> Iterator[tuple[_Part, np.ndarray]]:
        """Yield the random numbers of each part."""
        epoch, index = epoch_index
        drawn = {
            stream: uniforms(self.seed, epoch, stream, index, count)
            for stream, count in self.num_numbers.items()
        }
        for part, place in self.parts:
            yield part, drawn[part.stream][place]

    def _fill_part(
        self, image: Decoded, ops: list[Op], numbers: np.ndarray, target: np.ndarray
    ) -> None:
        size, whole = target.shape[-1], (image.height, image.width)
        if self.mean_std is None:
            make_views(image.picture, ops, size, numbers, target, whole)
            return
        views = np.empty(target.shape, np.uint8)
        make_views(image.picture, ops, size, numbers, views, whole)
        normalize_planes(views, *self.mean_std, target)

    def _reduction(self, epoch_index: EpochIndex, height: int, width: int) -> int:
        """Return by what an image can be reduced so that no crop has to grow because of it."""
        room = float("inf")
        for part, numbers in self._numbers(epoch_index):
            size = self.small.size if part.small and self.small else self.size_at(epoch_index[0])
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
            if (kept := self.kept.get(shown)) is not None:
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
