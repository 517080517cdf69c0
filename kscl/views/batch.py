"""The views that a method requests, and the batches that it gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kscl.views.recipes import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from kscl.views.device import Pending


@dataclass(frozen=True)
class SmallViews:
    """Small crops of each image."""

    count: int
    size: int  # width and height in pixels
    scale: tuple[float, float]  # fraction of the image's area


@dataclass(frozen=True)
class Views:
    """The views of each image; full-size ones have INPUT.SIZE pixels."""

    count: int  # full-size views
    recipe: Recipe  # of the first ones, and of small ones at their own scale
    others: Recipe  # of the rest
    first: int = 1  # how many of them are the first ones
    small: SmallViews | None = None


class Batch(NamedTuple):
    """Views of B images, and which images could not be read."""

    views: Tensor  # (B, V, 3, H, W), uint8 or float32
    instances: Tensor  # (B,) int64, the index of the image shown
    bad: list[tuple[int, str]] = []  # noqa: RUF012  # index and reason of each unreadable image
    small: Tensor | None = None  # (B, S, 3, h, w)
    pending: list[Pending] = []  # noqa: RUF012  # what the device still does to the views
    small_pending: list[Pending] = []  # noqa: RUF012

    def chunk(self, parts: int) -> Iterator[Batch]:
        """Yield equal parts."""
        tensors = (self.views, self.instances, self.small)
        split = ([None] * parts if one is None else one.chunk(parts) for one in tensors)
        for views, instances, small in zip(*split, strict=True):
            assert views is not None
            yield Batch(views, instances, [], small)
