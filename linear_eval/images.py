"""Labeled images: class folders, samples of each class, and the protocols' views.

Views are torchvision's own operations on PIL images, bit for bit. Decoding is `kscl.data.formats`:
for ordinary files the same pixels as PIL's, and files with an EXIF orientation are upright, as they
were in pretraining.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from kscl.data.formats import MAX_PIXELS, UnreadableImage
from kscl.data.loader import Batch, EpochIndex, load_in_workers
from kscl.data.open import FileSource, open_source
from kscl.data.source import read_picture
from kscl.errors import KsclError
from kscl.records.fingerprint import fingerprint
from kscl.rng import Stream, permutation, uniforms
from kscl.runtime.distributed import on_first_rank
from kscl.views.augment import CROP_DRAWS, sample_crop
from linear_eval.config import CENTER, FLIP

FIXED_CROP = "crop"  # "crop0", "crop1", …: random crops that are the same in every run
NUM_DRAWS = CROP_DRAWS + 1


@dataclass(frozen=True)
class Geometry:
    """The sizes and chances that make a view of a picture."""

    size: int
    resize: int
    scale: tuple[float, float]
    ratio: tuple[float, float]
    flip: float
    interpolation: str = "bilinear"

    def center(self, picture: Image.Image) -> Image.Image:
        """Resize the short side and cut out the center."""
        resized = F.resize(picture, self.resize, InterpolationMode(self.interpolation))
        return F.center_crop(resized, [self.size, self.size])

    def random_crop(self, picture: Image.Image, numbers: np.ndarray) -> Image.Image:
        """Cut out a random resized crop, perhaps flipped, by NUM_DRAWS numbers in [0, 1)."""
        draw = iter(numbers.tolist()).__next__
        flipped = draw() < self.flip
        box = sample_crop(picture.height, picture.width, self.scale, self.ratio, draw)
        size, mode = [self.size, self.size], InterpolationMode(self.interpolation)
        view = F.resized_crop(picture, *box, size, mode)
        return F.hflip(view) if flipped else view

    def fixed(self, picture: Image.Image, view: str, image: int) -> Image.Image:
        """Make a view by its name; a fixed crop depends on the image's index and nothing else."""
        if view == CENTER:
            return self.center(picture)
        if view == FLIP:
            return F.hflip(self.center(picture))
        turn = int(view.removeprefix(FIXED_CROP))
        return self.random_crop(picture, uniforms(0, turn, Stream.FIXED_CROPS, image, NUM_DRAWS))

    def augmented(self, picture: Image.Image, seed: int, epoch: int, image: int) -> Image.Image:
        """Make what training sees of an image in an epoch."""
        return self.random_crop(picture, uniforms(seed, epoch, Stream.VIEWS, image, NUM_DRAWS))


def geometry(cfg: CfgNode) -> Geometry:
    """Read the geometry of the views from a config."""
    given = cfg.INPUT
    ranges = tuple(given.SCALE), tuple(given.RATIO)
    return Geometry(given.SIZE, given.RESIZE, *ranges, given.FLIP, given.INTERPOLATION)


def slot(view: str) -> int:
    """Return the number of a fixed view among all that there can be."""
    fixed = {CENTER: 0, FLIP: 1}
    return fixed[view] if view in fixed else len(fixed) + int(view.removeprefix(FIXED_CROP))


def to_bytes(picture: Image.Image) -> Tensor:
    """Return the pixels as (3, H, W), uint8."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


# Of a picture, the epoch, and the image's index in its source.
MakeViews = Callable[[Image.Image, int, int], Sequence[Image.Image]]


@dataclass(frozen=True)
class LabeledImages:
    """One split: the images used of it, their classes, and what stands for it in a record."""

    source: FileSource
    classes: list[str]
    numbers: np.ndarray  # indices of the images in the source, rising
    labels: np.ndarray  # int64, of those images: (N,), or (N, C) of an annotated set
    fingerprint: dict[str, Any]
    max_pixels: int = MAX_PIXELS

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def targets(self) -> Tensor:
        """The classes of the images, int64."""
        return torch.from_numpy(self.labels)

    def part(self, chosen: np.ndarray) -> LabeledImages:
        """Return some of the images."""
        return replace(self, numbers=self.numbers[chosen], labels=self.labels[chosen])


def open_data(cfg: CfgNode) -> tuple[LabeledImages, LabeledImages]:
    """Open train and val; raise KsclError unless they have the same classes."""
    train, val = (
        open_class_folders(key, where, cfg)
        for key, where in (("DATA.TRAIN", cfg.DATA.TRAIN), ("DATA.VAL", cfg.DATA.VAL))
    )
    check_same_classes(train, val)
    if cfg.DATA.IMAGES_PER_CLASS:
        train = train.part(few_of_each_class(train.labels, cfg.DATA.IMAGES_PER_CLASS, cfg.SEED))
    return train, val


def check_same_classes(train: LabeledImages, val: LabeledImages) -> None:
    """Raise KsclError unless both sets have the same classes, and at least two."""
    only_train = sorted(set(train.classes) - set(val.classes))
    only_val = sorted(set(val.classes) - set(train.classes))
    if only_train or only_val:
        lines = [
            f"\n  only in {images.source.where}: {', '.join(names)}"
            for images, names in ((train, only_train), (val, only_val))
            if names
        ]
        raise KsclError(
            f"The classes of {train.source.where} and {val.source.where} differ, so no number "
            f"could be trusted. Make their folders the same.{''.join(lines)}"
        )
    if len(train.classes) < 2:
        raise KsclError(
            f"{train.source.where} holds the class {train.classes[0]} alone, so there is nothing "
            "to tell apart. Make one folder per class."
        )


def file_state(images: LabeledImages) -> str:
    """Hash the files' names, sizes and times, to notice what a fingerprint's sample may miss."""
    digest = hashlib.sha256()
    for number in images.numbers.tolist():
        path = images.source.name(number)
        try:
            status = os.stat(path)
        except OSError as error:
            raise KsclError(
                f"{path} is gone: {error.strerror}. Bring it back, or start again without it."
            ) from error
        name = os.path.relpath(path, images.source.root)
        line = f"{number}\0{name}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


class ViewsOfImages(Dataset[Batch]):
    """Batches of views (uint8), each picture decoded once; `instances` are indices into the set."""

    def __init__(self, images: LabeledImages, make_views: MakeViews) -> None:
        self.images = images
        self.make_views = make_views

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, wanted: Sequence[EpochIndex]) -> Batch:
        """Return one batch; it lacks the views of images that cannot be read and names those."""
        shown: list[Tensor] = []
        bad: list[tuple[int, str]] = []
        for epoch, index in wanted:
            number = int(self.images.numbers[index])
            try:
                pixels = read_picture(self.images.source, number, self.images.max_pixels)
            except UnreadableImage as error:
                bad.append((number, str(error)))
                continue
            views = self.make_views(Image.fromarray(pixels), epoch, number)
            shown.append(torch.stack([to_bytes(view) for view in views]))
        indices = torch.tensor([index for _, index in wanted], dtype=torch.int64)
        return Batch(torch.stack(shown) if shown else torch.empty(0), indices, bad)


def load_batches(
    dataset: ViewsOfImages, batches: Iterable[list[EpochIndex]], num_workers: int
) -> Iterator[Batch]:
    """Yield the views of each batch in order; an image that cannot be read is an error."""
    for batch in load_in_workers(dataset, batches, num_workers):
        for number, reason in batch.bad:
            raise _unreadable(dataset.images.source.name(number), reason)
        yield batch


def _unreadable(name: str, reason: str) -> KsclError:
    return KsclError(
        f"{name} cannot be read: {reason}. A score counts every image, so none is skipped. Fix "
        "it, or remove it from its folder."
    )


def open_class_folders(key: str, where: str, cfg: CfgNode) -> LabeledImages:
    """Open a folder with one folder per class, which the config names under `key`."""
    if not where:
        raise KsclError(f"No images are named. Set {key} to a folder with class folders.")
    if not os.path.isdir(where):
        raise KsclError(f"{key} is {where}, which is not a folder. Make one per class in it.")
    cache_dir = cfg.DATA.CACHE_DIR
    source = open_source(where, cache_dir)
    labels = source.labels
    if not isinstance(source, FileSource) or labels is None:
        raise KsclError(
            f"{where} ({key}) holds images that do not lie in a class folder. Put each into the "
            "folder of its class."
        )
    for lost in source.lost:
        raise _unreadable(lost.name, lost.reason)
    print_ = on_first_rank(lambda: fingerprint(where, cache_dir).as_dict())
    return LabeledImages(
        source,
        labels.classes,
        np.arange(len(source)),
        labels.numbers,
        print_ | {"path": os.path.abspath(where)},
        cfg.DATA.MAX_PIXELS,
    )


def hold_out(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images (kept, held out), both ascending.

    `fraction` of each class is held out, and at least one image; a class of one image keeps it.
    """
    held = np.zeros(len(labels), bool)
    for images in _shuffled_classes(labels, seed, Stream.HELD_OUT):
        count = min(max(1, round(fraction * len(images))), len(images) - 1)
        held[images[:count]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def few_of_each_class(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return `count` images of each class, ascending; all images of a smaller class."""
    chosen = [images[:count] for images in _shuffled_classes(labels, seed, Stream.FEW_SHOT)]
    return np.sort(np.concatenate(chosen))


def fraction_of_each_class(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Return this fraction of each class, ascending, and at least one image of each."""
    chosen = [
        images[: max(1, round(fraction * len(images)))]
        for images in _shuffled_classes(labels, seed, Stream.FEW_SHOT)
    ]
    return np.sort(np.concatenate(chosen))


def _shuffled_classes(labels: np.ndarray, seed: int, stream: Stream) -> list[np.ndarray]:
    """Return the images of each class in random order."""
    order = permutation(seed, 0, stream, len(labels))
    return [order[labels[order] == number] for number in np.unique(labels)]
