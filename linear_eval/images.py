"""Labeled images: class folders, annotated sets, subsets, and the views that probes use.

Views are torchvision's own operations on PIL images, bit for bit. Images are decoded and turned
upright (EXIF) as in pretraining.
"""

from __future__ import annotations

import hashlib
import os
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from kscl.data.annotations import parse_source, read_source
from kscl.data.formats import MAX_PIXELS, UnreadableImage
from kscl.data.labeled import draw_labeled, draw_of
from kscl.data.loader import EpochIndex, load_in_workers
from kscl.data.open import FileSource, open_source
from kscl.data.source import Names, cache_folder, read_file, read_picture
from kscl.errors import KsclError
from kscl.records.fingerprint import fingerprint
from kscl.rng import Stream, permutation, uniforms
from kscl.runtime.distributed import on_first_rank
from kscl.runtime.files import write_atomically
from kscl.views.augment import CROP_DRAWS, sample_crop
from kscl.views.batch import Batch
from linear_eval.config import CENTER, FLIP, WHOLE

FIXED_CROP = "crop"  # crop0, crop1, …: random crops that are the same in every run
NUM_DRAWS = CROP_DRAWS + 1
PRESENT, ABSENT, IGNORED = 1, 0, -1  # labels of annotated sets

# SHA-256 of SimCLR's published lists of ImageNet training images.
SIMCLR = "https://raw.githubusercontent.com/google-research/simclr"
SIMCLR += "/383d4143fd8cf7879ae10f1046a9baeb753ff438/imagenet_subsets"
PUBLISHED = {
    "simclr_1percent": "71e82a48ba78252683ae334c4d019ebd5c6e855b9599c1389fbe83eb9549cf17",
    "simclr_10percent": "6d09de11e7bdaf5b1f3b1f249b6183695f97310cdd20f0c03e7235b6b9392091",
}
TIMEOUT = 60  # seconds


# Views

# (picture, epoch, index in its source) -> views
MakeViews = Callable[[Image.Image, int, int], Sequence[Image.Image]]


def center(picture: Image.Image, given: CfgNode) -> Image.Image:
    """Resize the short side and crop the center; `given` is the section INPUT."""
    resized = F.resize(picture, given.RESIZE, InterpolationMode(given.INTERPOLATION))
    return F.center_crop(resized, [given.SIZE, given.SIZE])


def random_crop(picture: Image.Image, given: CfgNode, numbers: np.ndarray) -> Image.Image:
    """Return a random resized crop, perhaps flipped, from NUM_DRAWS numbers in [0, 1)."""
    draw = iter(numbers.tolist()).__next__
    flipped = draw() < given.FLIP
    box = sample_crop(picture.height, picture.width, given.SCALE, given.RATIO, draw)
    size, mode = [given.SIZE, given.SIZE], InterpolationMode(given.INTERPOLATION)
    view = F.resized_crop(picture, *box, size, mode)
    return F.hflip(view) if flipped else view


def fixed_view(picture: Image.Image, given: CfgNode, view: str, image: int) -> Image.Image:
    """Return a view by name; a fixed crop depends only on the image's index."""
    if view == CENTER:
        return center(picture, given)
    if view == FLIP:
        return F.hflip(center(picture, given))
    if view == WHOLE:
        return F.resize(picture, [given.SIZE, given.SIZE], InterpolationMode(given.INTERPOLATION))
    turn = int(view.removeprefix(FIXED_CROP))
    return random_crop(picture, given, uniforms(0, turn, Stream.FIXED_CROPS, image, NUM_DRAWS))


def augmented(
    picture: Image.Image, given: CfgNode, seed: int, epoch: int, image: int
) -> Image.Image:
    """Return the training view of an image in an epoch."""
    return random_crop(picture, given, uniforms(seed, epoch, Stream.VIEWS, image, NUM_DRAWS))


def view_settings(cfg: CfgNode) -> dict[str, Any]:
    """Return what a fixed view depends on."""
    names = ("SIZE", "RESIZE", "SCALE", "RATIO", "FLIP", "INTERPOLATION")
    return {name: cfg.INPUT[name] for name in names}


def slot(view: str) -> int:
    """Return where in a file of features a fixed view is."""
    fixed = {CENTER: 0, FLIP: 1, WHOLE: 0}  # CENTER and WHOLE never share a file
    return fixed[view] if view in fixed else 2 + int(view.removeprefix(FIXED_CROP))


def to_bytes(picture: Image.Image) -> Tensor:
    """Return the pixels as (3, H, W), uint8."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


# Sets


@dataclass(frozen=True)
class LabeledImages:
    """The images of a split that are used, with their labels and a fingerprint for records."""

    source: FileSource
    classes: list[str]
    numbers: np.ndarray  # ascending indices of the images in the source
    labels: np.ndarray  # int64: (N,), or (N, C) for an annotated set
    fingerprint: dict[str, Any]
    max_pixels: int = MAX_PIXELS

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def targets(self) -> Tensor:
        """Return the labels as a tensor."""
        return torch.from_numpy(self.labels)

    def part(self, chosen: np.ndarray) -> LabeledImages:
        """Return some of the images."""
        return replace(self, numbers=self.numbers[chosen], labels=self.labels[chosen])


def open_data(cfg: CfgNode) -> tuple[LabeledImages, LabeledImages]:
    """Open the chosen subset of train, and val; both must have the same classes."""
    data = cfg.DATA
    train = open_class_folders("DATA.TRAIN", data.TRAIN, cfg)
    val = open_class_folders("DATA.VAL", data.VAL, cfg)
    check_same_classes(train, val)
    if data.IMAGES_PER_CLASS:
        chosen = few_of_each_class(train.labels, data.IMAGES_PER_CLASS, cfg.SEED)
    elif data.SUBSET:
        content = on_first_rank(lambda: list_content(data.SUBSET, data.CACHE_DIR))
        chosen = listed_images(train, content, data.SUBSET)
    elif data.FRACTION < 1:
        shown = train.labels[:, None].tolist()
        draw = draw_of(data, cfg.SEED)
        chosen = np.array(draw_labeled(shown, data.FRACTION, draw, "DATA.FRACTION"))
    else:
        return train, val
    return train.part(chosen), val


def open_class_folders(key: str, where: str, cfg: CfgNode) -> LabeledImages:
    """Open a folder with one folder per class; `key` names it in errors."""
    if not os.path.isdir(where):
        raise KsclError(f"{key} must be a folder with one folder per class, got '{where}'.")
    cache_dir = cfg.DATA.CACHE_DIR
    source = open_source(where, cache_dir)
    labels = source.labels
    if not isinstance(source, FileSource) or labels is None:
        raise KsclError(
            f"{where} ({key}) has images outside of class folders. Move each into the folder of "
            "its class."
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


def check_same_classes(train: LabeledImages, val: LabeledImages) -> None:
    """Raise an error unless both sets have the same classes, and at least two."""
    lines = [
        f"\n  only in {one.source.where}: {', '.join(sorted(only))}"
        for one, other in ((train, val), (val, train))
        if (only := set(one.classes) - set(other.classes))
    ]
    if lines:
        raise KsclError(
            f"{train.source.where} and {val.source.where} must have the same class folders:"
            f"{''.join(lines)}"
        )
    if len(train.classes) < 2:
        raise KsclError(
            f"{train.source.where} must have at least two class folders, got only "
            f"{train.classes[0]}."
        )


def open_annotated(where: str, classes: Sequence[str], cfg: CfgNode) -> LabeledImages:
    """Open an annotated set, whose images may have several classes each.

    A label is PRESENT, ABSENT, or IGNORED if all objects of the class are difficult.
    """
    source = parse_source(where)
    found = read_source(source, classes).checked()
    root = source.image_folder
    names = Names.pack(os.path.relpath(image.path or "", root) for image in found.images)
    labels = np.full((len(found.images), len(classes)), ABSENT, np.int64)
    for row, image in zip(labels, found.images, strict=True):
        for thing in sorted(image.objects, key=lambda thing: not thing.difficult):
            row[found.class_names.index(thing.name)] = IGNORED if thing.difficult else PRESENT

    def print_() -> dict[str, object]:
        images = fingerprint(root, cfg.DATA.CACHE_DIR)
        digest = hashlib.sha256(images.hash.encode())
        digest.update("\0".join([*found.class_names, *(i.id for i in found.images)]).encode())
        digest.update(labels.astype(np.int8).tobytes())
        part = {"path": os.path.abspath(root), "hash": images.hash}
        return images.as_dict() | {"hash": digest.hexdigest()[:16], "parts": [part]}

    return LabeledImages(
        FileSource(where, str(root), names),
        list(classes),
        np.arange(len(labels)),
        labels,
        on_first_rank(print_),
        cfg.DATA.MAX_PIXELS,
    )


def file_state(images: LabeledImages) -> str:
    """Hash the files' names, sizes and times: a fingerprint only samples their content."""
    digest = hashlib.sha256()
    for number in images.numbers.tolist():
        path = images.source.name(number)
        try:
            status = os.stat(path)
        except OSError as error:
            raise KsclError(
                f"{path} is gone: {error.strerror}. Restore it, or start again without it."
            ) from error
        name = os.path.relpath(path, images.source.root)
        line = f"{number}\0{name}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


# Loading


class _Views(Dataset[Batch]):
    """Batches of views (uint8); each picture is decoded once, `instances` index the set."""

    def __init__(self, images: LabeledImages, make_views: MakeViews) -> None:
        self.images = images
        self.make_views = make_views

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, wanted: Sequence[EpochIndex]) -> Batch:
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


def load_views(
    images: LabeledImages,
    make_views: MakeViews,
    batches: Iterable[list[EpochIndex]],
    num_workers: int,
) -> Iterator[Batch]:
    """Yield the views of each batch in order; an unreadable image is an error."""
    for batch in load_in_workers(_Views(images, make_views), batches, num_workers):
        for number, reason in batch.bad:
            raise _unreadable(images.source.name(number), reason)
        yield batch


def load_center_crops(
    cfg: CfgNode, images: LabeledImages, parts: Iterable[Iterable[int]]
) -> Iterator[Tensor]:
    """Yield center crops (B, 3, H, W), uint8, of each part of the images."""
    batches = [[(0, int(index)) for index in part] for part in parts]

    def make_views(picture: Image.Image, *_: int) -> list[Image.Image]:
        return [center(picture, cfg.INPUT)]

    for batch in load_views(images, make_views, batches, cfg.DATA.NUM_WORKERS):
        yield batch.views[:, 0]


def _unreadable(name: str, reason: str) -> KsclError:
    return KsclError(
        f"{name} cannot be read: {reason}. A score counts every image, so none is skipped. Fix "
        "it, or remove it from its folder."
    )


# Parts of a set


def hold_out(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (kept, held-out) images, both ascending.

    `fraction` of each class is held out, at least one image; a class of one image keeps it. The
    class of an image with several, from labels (N, C), is its rarest one.
    """
    if labels.ndim > 1:
        counts = (labels == PRESENT).sum(0)
        rarity = np.where(labels == PRESENT, 1 / np.maximum(counts, 1), 0)
        labels = np.where(rarity.any(1), rarity.argmax(1), -1)
    held = _sample(labels, lambda n: min(max(1, round(fraction * n)), n - 1), seed, Stream.HELD_OUT)
    return np.setdiff1d(np.arange(len(labels)), held), held


def few_of_each_class(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return `count` images of each class, ascending, or all images of a smaller class."""
    return _sample(labels, lambda n: count, seed, Stream.FEW_SHOT)


def _sample(
    labels: np.ndarray, count: Callable[[int], int], seed: int, stream: Stream
) -> np.ndarray:
    """Draw count(n) images of each class that has n."""
    order = permutation(seed, 0, stream, len(labels))
    classes = [order[labels[order] == number] for number in np.unique(labels)]
    return np.sort(np.concatenate([images[: count(len(images))] for images in classes]))


def list_content(subset: str, cache_dir: str) -> bytes:
    """Return the bytes of a list: a file, or a published list, downloaded once and checked."""
    if subset not in PUBLISHED:
        try:
            return read_file(subset)
        except OSError as error:
            raise KsclError(
                f"DATA.SUBSET must be a file or one of {', '.join(PUBLISHED)}, got {subset}: "
                f"{error.strerror}."
            ) from error
    name, expected = f"{subset.removeprefix('simclr_')}.txt", PUBLISHED[subset]
    address, path = f"{SIMCLR}/{name}", cache_folder(cache_dir) / "subsets" / name
    where: str | Path = path if path.exists() else address
    try:
        if where is path:
            content = read_file(path)
        else:
            with urllib.request.urlopen(address, timeout=TIMEOUT) as source:
                content = source.read()
    except (OSError, ValueError) as error:  # a URLError is an OSError
        raise KsclError(
            f"{where} cannot be read: {error}. Download {address} and save it as {path}."
        ) from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != expected:
        raise KsclError(
            f"{where} must be SimCLR's {name} with SHA-256 {expected}, got {digest}. Delete it "
            "and download it again."
        )
    if where is not path:
        write_atomically(path, content)
    return content


def subset_hash(subset: str, cache_dir: str) -> str:
    """Return the SHA-256 of a list; that of a published one needs no download."""
    if subset in PUBLISHED:
        return PUBLISHED[subset]
    return hashlib.sha256(list_content(subset, cache_dir)).hexdigest()


def listed_images(images: LabeledImages, content: bytes, where: str) -> np.ndarray:
    """Return the images whose file name, or path below the folder, is in the list."""
    names = content.decode("utf-8", "replace").split()
    places: dict[str, list[tuple[int, str]]] = {}  # (number, path) by path and by file name
    for place, number in enumerate(images.numbers.tolist()):
        path = os.path.relpath(images.source.name(number), images.source.root)
        for name in (path, os.path.basename(path)):  # they differ: a path has its class folder
            places.setdefault(name, []).append((place, path))
    missing = [name for name in names if name not in places]
    if missing or not names:
        example = f", e.g. {missing[0]}" if missing else ""
        raise KsclError(
            f"{len(missing):,} of the {len(names):,} images listed in {where} are not in "
            f"{images.source.where}{example}. Name the folder that the list is for, or another "
            "list (DATA.SUBSET)."
        )
    for name in names:
        if len(same := places[name]) > 1:
            raise KsclError(
                f"{where} lists {name}, the name of {len(same):,} images in "
                f"{images.source.where}, e.g. {same[0][1]} and {same[1][1]}. List their paths "
                "below the folder."
            )
    return np.unique(np.array([places[name][0][0] for name in names]))
