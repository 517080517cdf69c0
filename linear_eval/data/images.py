"""Labelled images in class folders: listing, checking, and batches of their views."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from fvcore.common.config import CfgNode
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kscl.data.decode import UnreadableImage, decode_image
from kscl.data.folder import FileSource
from kscl.data.open import ImageSource, open_source
from kscl.records.fingerprint import fingerprint
from kscl.runtime.launch import on_first_rank
from linear_eval.data.views import to_bytes
from linear_eval.errors import LinearEvalError
from linear_eval.splits import few_of_each_class

Place = tuple[int, int]  # epoch, and place of the image in its set
MakeViews = Callable[[Image.Image, int, int], Sequence[Image.Image]]  # of picture, epoch, number


@dataclass(frozen=True)
class LabelledImages:
    """One split: the images used of it, their classes, and what stands for it in a record."""

    source: ImageSource
    classes: list[str]
    numbers: np.ndarray  # of the images in the source, rising
    labels: np.ndarray  # int64, of those images
    fingerprint: dict[str, Any]

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def targets(self) -> Tensor:
        return torch.from_numpy(self.labels)


def open_data(cfg: CfgNode) -> tuple[LabelledImages, LabelledImages]:
    """Train and val, with the same classes."""
    train, val = _open_split("DATA.TRAIN", cfg), _open_split("DATA.VAL", cfg)
    check_same_classes(train, val)
    if cfg.DATA.IMAGES_PER_CLASS:
        train = take_few(train, cfg.DATA.IMAGES_PER_CLASS, cfg.SEED)
    return train, val


def take_few(images: LabelledImages, count: int, seed: int) -> LabelledImages:
    chosen = few_of_each_class(images.labels, count, seed)
    return LabelledImages(
        images.source,
        images.classes,
        images.numbers[chosen],
        images.labels[chosen],
        images.fingerprint,
    )


def check_same_classes(train: LabelledImages, val: LabelledImages) -> None:
    only_train = sorted(set(train.classes) - set(val.classes))
    only_val = sorted(set(val.classes) - set(train.classes))
    if only_train or only_val:
        lines = [
            f"\n  only in {images.source.where}: {', '.join(names)}"
            for images, names in ((train, only_train), (val, only_val))
            if names
        ]
        raise LinearEvalError(
            "the classes of DATA.TRAIN and DATA.VAL differ, so no number could be trusted: make "
            f"their folders the same{''.join(lines)}"
        )
    if len(train.classes) < 2:
        raise LinearEvalError(
            f"{train.source.where} holds the class {train.classes[0]} alone: there is nothing to "
            "tell apart; one folder a class is needed"
        )


def file_state(images: LabelledImages) -> str:
    """A hash of the files' names, sizes and times: notices what a fingerprint's sample may miss."""
    digest = hashlib.sha256()
    for number in images.numbers.tolist():
        path = images.source.name(number)
        status = os.stat(path)
        name = os.path.relpath(path, images.source.where)
        line = f"{number}\0{name}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


class Batch(NamedTuple):
    views: Tensor  # (B, V, 3, H, W), uint8
    places: Tensor  # (B,) int64, of the images in their set
    unreadable: list[str]  # names and reasons; a batch with any is never used


class ViewsOfImages(Dataset[Batch]):
    """Batches of views, each picture decoded once."""

    def __init__(self, images: LabelledImages, make_views: MakeViews) -> None:
        self.images = images
        self.make_views = make_views

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, places: Sequence[Place]) -> Batch:
        source, shown, unreadable = self.images.source, [], []
        for epoch, place in places:
            number = int(self.images.numbers[place])
            try:
                picture = Image.fromarray(decode_image(source.read(number)))
            except (UnreadableImage, OSError) as error:
                unreadable.append(f"{source.name(number)} ({error})")
                continue
            views = self.make_views(picture, epoch, number)
            shown.append(torch.stack([to_bytes(view) for view in views]))
        numbers = torch.tensor([place for _, place in places])
        return Batch(torch.stack(shown) if shown else torch.empty(0), numbers, unreadable)


def load_batches(
    dataset: ViewsOfImages, batches: Iterable[list[Place]], num_workers: int
) -> Iterator[Batch]:
    """The views of the images of each batch, in order; an image that cannot be read is an error."""
    loader: DataLoader[Batch] = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=num_workers,
        collate_fn=_already_a_batch,
        worker_init_fn=_one_thread,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # the loader must not draw from anybody else's stream
    )
    for batch in loader:
        if batch.unreadable:
            raise LinearEvalError(
                f"{batch.unreadable[0]} cannot be read. A score counts every image, so none is "
                "skipped: mend it, or remove it from its folder"
            )
        yield batch


def _open_split(key: str, cfg: CfgNode) -> LabelledImages:
    where = cfg.DATA[key.removeprefix("DATA.")]
    if not where:
        raise LinearEvalError(f"no images are named: set {key} to a folder with one folder a class")
    if not Path(where).is_dir():
        raise LinearEvalError(f"{key} is {where}, which is no folder; one folder a class is needed")
    source = open_source(where, cfg.DATA.CACHE_DIR)
    labels = source.labels
    if not isinstance(source, FileSource) or labels is None:
        raise LinearEvalError(
            f"{where} ({key}) holds images that lie in no class folder: put each into the folder "
            "of its class"
        )
    print_ = on_first_rank(lambda: fingerprint(where).as_dict()) | {"path": os.path.abspath(where)}
    return LabelledImages(source, labels.classes, np.arange(len(source)), labels.numbers, print_)


def _already_a_batch(batch: Any) -> Any:
    return batch


def _one_thread(worker: int) -> None:
    cv2.setNumThreads(1)
