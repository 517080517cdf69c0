"""CIFAR-10 and STL-10 as folders of PNG files, downloaded by torchvision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from PIL.Image import Image, fromarray
from torchvision.datasets import CIFAR10, STL10

from kscl.config import shipped_configs
from kscl.data.formats import UnreadableImage, decode_image, is_image
from kscl.errors import KsclError
from kscl.runtime.files import whole_folder
from kscl.runtime.logs import progress

SUBSET = "suites/small/cifar10_20k.txt"  # which of CIFAR-10's images to use; ships with the configs
# Of each class's 1,800 training images, by number: 2,000 images to pretrain on and 4,000 to train
# probes on, 2,000 to choose settings on, and 10,000 that only final results are reported on.
PARTS = {"pretrain": (0, 200), "train": (200, 600), "val": (600, 800), "test": (800, 1800)}

Pictures = TypeVar("Pictures")
Named = tuple[str, Image]  # "train/bird/0042", and the picture


def prepare_cifar10(root: Path, downloads: Path) -> Path:
    """Write `root/cifar10_20k/{train,val}/CLASS`, and its train in the parts of a small set."""
    folder = _write_folder(root / "cifar10_20k", _cifar10_subset(downloads), 20_000)
    _write_folder(root / "cifar10_small", _parts(folder / "train"), 10 * PARTS["test"][1])
    return folder


def prepare_stl10(root: Path, downloads: Path) -> Path:
    """Write `root/stl10/unlabeled`, and `train` and `test` with one folder per class."""
    return _write_folder(root / "stl10", _stl10(downloads), 113_000)


def _stl10(downloads: Path) -> Iterator[Named]:
    for split in ("unlabeled", "train", "test"):
        pictures = _open_set(STL10, downloads, split=split)
        for index, (picture, label) in enumerate(pictures):
            under = f"{split}/{pictures.classes[label]}" if label >= 0 else split
            yield f"{under}/{index:06d}", picture


def _parts(train: Path) -> Iterator[Named]:
    """Yield images of each class for pretraining, and others for training and scoring probes."""
    for folder in sorted(path for path in train.iterdir() if path.is_dir()):
        files = sorted(path for path in folder.iterdir() if is_image(path.name))
        for split, (first, end) in PARTS.items():
            for path in files[first:end]:
                yield f"{split}/{folder.name}/{path.stem}", _read(path)


def read_subset(path: Path) -> dict[tuple[str, int], str]:
    """Return {(class, index among its images): split}."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            split, name, *indices = line.split()
            found.update({(name, int(index)): split for index in indices})
    return found


def _cifar10_subset(downloads: Path) -> Iterator[Named]:
    left = read_subset(shipped_configs() / SUBSET)
    seen = dict.fromkeys((name for name, _ in left), 0)
    for name, picture in _cifar10(downloads, set(seen)):
        split = left.pop((name, seen[name]), None)
        if split is not None:
            found = _read(picture) if isinstance(picture, Path) else picture
            yield f"{split}/{name}/{seen[name]:04d}", found
        seen[name] += 1
    if left:
        name, index = next(iter(left))
        raise KsclError(
            f"{downloads} holds {seen[name]} images of {name}, but the list wants index {index}. "
            "Put all training images of CIFAR-10 there."
        )


def _cifar10(downloads: Path, classes: set[str]) -> Iterator[tuple[str, Image | Path]]:
    """Yield (class, picture or its path), in CIFAR-10's order within each class.

    They come from a copy with one folder per class, with names in that order, or by torchvision.
    """
    for folder in (downloads / "train", downloads):
        if all((folder / name).is_dir() for name in classes):
            for name in sorted(classes):
                for path in sorted(folder.joinpath(name).iterdir()):
                    if is_image(path.name):  # anything else would shift the indices
                        yield name, path
            return
    pictures = _open_set(CIFAR10, downloads)
    for picture, label in pictures:
        yield pictures.classes[label], picture


def _read(path: Path) -> Image:
    try:
        return fromarray(decode_image(path.read_bytes()))
    except (OSError, UnreadableImage) as error:
        raise KsclError(f"{path} is not an image that can be read: {error}.") from error


def _open_set(kind: Callable[..., Pictures], downloads: Path, **which: str) -> Pictures:
    """Return a data set of torchvision, downloaded if it is not there."""
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        return kind(str(downloads), download=True, **which)
    except (RuntimeError, OSError) as error:  # urllib's errors are OSErrors
        raise KsclError(
            f"{kind.__name__} could not be downloaded or is damaged: {error}. Without a network, "
            f"put torchvision's archive of it into {downloads}."
        ) from error


def _write_folder(folder: Path, pictures: Iterable[Named], count: int) -> Path:
    """Save the pictures under a temporary name and rename the folder when it is complete."""
    if folder.exists():
        print(f"{folder} exists and is left as it is. Delete it to make it again.")
        return folder
    with whole_folder(folder) as place:
        for name, picture in progress(pictures, folder.name, count):
            file = place / f"{name}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            picture.save(file)
    return folder
