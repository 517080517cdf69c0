"""Labeled images in class folders: list them, check them, make batches of their views."""

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

from kscl.data.decode import read_picture
from kscl.data.folder import FileSource
from kscl.data.formats import MAX_PIXELS, UnreadableImage
from kscl.data.loader import load_in_workers
from kscl.data.open import open_source
from kscl.data.view_dataset import Batch, EpochIndex
from kscl.records.fingerprint import fingerprint
from kscl.runtime.processes.ranks import on_first_rank
from linear_eval.data.views import to_bytes
from linear_eval.errors import LinearEvalError
from linear_eval.splits import few_of_each_class

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


def open_data(cfg: CfgNode) -> tuple[LabeledImages, LabeledImages]:
    """Open train and val; raise LinearEvalError unless they have the same classes."""
    train, val = (
        open_class_folders(key, where, cfg)
        for key, where in (("DATA.TRAIN", cfg.DATA.TRAIN), ("DATA.VAL", cfg.DATA.VAL))
    )
    check_same_classes(train, val)
    if cfg.DATA.IMAGES_PER_CLASS:
        train = take_few(train, cfg.DATA.IMAGES_PER_CLASS, cfg.SEED)
    return train, val


def take_few(images: LabeledImages, count: int, seed: int) -> LabeledImages:
    """Return `count` images of each class."""
    chosen = few_of_each_class(images.labels, count, seed)
    return replace(images, numbers=images.numbers[chosen], labels=images.labels[chosen])


def check_same_classes(train: LabeledImages, val: LabeledImages) -> None:
    """Raise LinearEvalError unless both sets have the same classes, and at least two."""
    only_train = sorted(set(train.classes) - set(val.classes))
    only_val = sorted(set(val.classes) - set(train.classes))
    if only_train or only_val:
        lines = [
            f"\n  only in {images.source.where}: {', '.join(names)}"
            for images, names in ((train, only_train), (val, only_val))
            if names
        ]
        raise LinearEvalError(
            f"The classes of {train.source.where} and {val.source.where} differ, so no number "
            f"could be trusted. Make their folders the same.{''.join(lines)}"
        )
    if len(train.classes) < 2:
        raise LinearEvalError(
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
            raise LinearEvalError(
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


def _unreadable(name: str, reason: str) -> LinearEvalError:
    return LinearEvalError(
        f"{name} cannot be read: {reason}. A score counts every image, so none is skipped. Fix "
        "it, or remove it from its folder."
    )


def open_class_folders(key: str, where: str, cfg: CfgNode) -> LabeledImages:
    """Open a folder with one folder per class, which the config names under `key`."""
    if not where:
        raise LinearEvalError(f"No images are named. Set {key} to a folder with class folders.")
    if not os.path.isdir(where):
        raise LinearEvalError(f"{key} is {where}, which is not a folder. Make one per class in it.")
    cache_dir = cfg.DATA.CACHE_DIR
    source = open_source(where, cache_dir)
    labels = source.labels
    if not isinstance(source, FileSource) or labels is None:
        raise LinearEvalError(
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
