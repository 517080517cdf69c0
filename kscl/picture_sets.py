"""CIFAR-10 and STL-10 as folders of pictures, which is what every tool here takes.

torchvision fetches and checks them; files that are there already are not fetched again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from PIL.Image import Image, fromarray
from torchvision.datasets import CIFAR10, STL10

from kscl.decode import UnreadableImage, decode_image
from kscl.errors import KsclError
from kscl.files import shipped_configs
from kscl.image_source import is_image
from kscl.logs import progress

SUBSET = "suites/small/cifar10_20k.txt"
Pictures = TypeVar("Pictures")
Named = tuple[str, Image]  # "train/bird/0042", and the picture


def prepare_cifar10_20k(root: Path, downloads: Path) -> Path:
    """`root/cifar10_20k/{train,val}/CLASS`: 20,000 of the training images, by a shipped list."""
    return _write(root / "cifar10_20k", _cifar10_subset(downloads), 20_000)


def prepare_stl10(root: Path, downloads: Path) -> Path:
    """`root/stl10/unlabelled`, and `train` and `test` with one folder a class."""
    return _write(root / "stl10", _stl10(downloads), 113_000)


def read_subset(path: Path) -> dict[tuple[str, int], str]:
    """(class, place among its images) → split."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            split, name, *places = line.split()
            found.update({(name, int(place)): split for place in places})
    return found


def _cifar10_subset(downloads: Path) -> Iterator[Named]:
    subset = read_subset(shipped_configs() / SUBSET)
    left = dict(subset)
    seen = dict.fromkeys((name for name, _ in subset), 0)
    for name, picture in _cifar10(downloads, set(seen)):
        split = left.pop((name, seen[name]), None)
        if split is not None:
            found = _read(picture) if isinstance(picture, Path) else picture
            yield f"{split}/{name}/{seen[name]:04d}", found
        seen[name] += 1
    if left:
        name, place = next(iter(left))
        raise KsclError(
            f"{downloads} holds {seen[name]} images of {name}, but the list wants number {place}: "
            "it takes the training images of CIFAR-10, all of them"
        )


def _cifar10(downloads: Path, classes: set[str]) -> Iterator[tuple[str, Image | Path]]:
    """(class, picture or where it lies), in CIFAR-10's order within each class.

    From a copy with one folder a class, whose names are in that order, or by torchvision.
    """
    for folder in (downloads / "train", downloads):
        if all((folder / name).is_dir() for name in classes):
            for name in sorted(classes):
                for path in sorted(folder.joinpath(name).iterdir()):
                    if is_image(path.name):  # anything else would shift the places
                        yield name, path
            return
    pictures = _open(CIFAR10, downloads)
    for picture, label in pictures:
        yield pictures.classes[label], picture


def _read(path: Path) -> Image:
    try:
        return fromarray(decode_image(path.read_bytes()))
    except (OSError, UnreadableImage) as error:
        raise KsclError(f"{path} is no image that can be read: {error}") from error


def _stl10(downloads: Path) -> Iterator[Named]:
    for split, folder in (("unlabeled", "unlabelled"), ("train", "train"), ("test", "test")):
        pictures = _open(STL10, downloads, split=split)
        for place, (picture, label) in enumerate(pictures):
            under = f"{folder}/{pictures.classes[label]}" if label >= 0 else folder
            yield f"{under}/{place:06d}", picture


def _open(kind: Callable[..., Pictures], downloads: Path, **which: str) -> Pictures:
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        return kind(str(downloads), download=True, **which)
    except (RuntimeError, OSError) as error:  # urllib's errors are OSErrors
        raise KsclError(
            f"{kind.__name__} could not be fetched or is damaged: {error}. Without a network, put "
            f"torchvision's archive of it into {downloads}"
        ) from error


def _write(folder: Path, pictures: Iterable[Named], count: int) -> Path:
    """All or nothing: written beside the folder, which then gets its name."""
    if folder.exists():
        print(f"{folder} is there already and left as it is; delete it to make it anew")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        for name, picture in progress(pictures, folder.name, count):
            file = place / f"{name}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            picture.save(file)
        place.chmod(0o755)
        place.rename(folder)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return folder
