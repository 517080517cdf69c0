"""Public data sets: VOC, CIFAR-10 and STL-10 fetched and laid out, ImageNet's layout checked."""

from __future__ import annotations

import os
import shutil
import socket
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from PIL.Image import Image, fromarray
from torchvision.datasets import CIFAR10, STL10
from torchvision.datasets.utils import check_md5, download_url
from torchvision.datasets.voc import DATASET_YEAR_DICT

from kscl.config import shipped_configs
from kscl.data.formats import is_image
from kscl.data.source import read_image
from kscl.errors import KsclError
from kscl.runtime.files import whole_folder
from kscl.runtime.logs import progress

# VOC 2007 and 2012, merged into the layout of Detectron2

TIMEOUT = 60.0  # seconds without a byte; torchvision would wait forever


@dataclass(frozen=True)
class Archive:
    """A file to download and what it holds."""

    url: str
    file: str
    md5: str
    year: str  # the folder it is merged into, VOC2007 or VOC2012
    split: str
    count: int  # images of a complete set


def voc_archives() -> list[Archive]:
    """Return torchvision's addresses and hashes, with the image counts of the VOC web pages."""
    return [
        Archive(known["url"], known["filename"], known["md5"], year, split, count)
        for known, year, split, count in (
            (DATASET_YEAR_DICT["2007"], "VOC2007", "trainval", 5011),
            (DATASET_YEAR_DICT["2007-test"], "VOC2007", "test", 4952),
            (DATASET_YEAR_DICT["2012"], "VOC2012", "trainval", 11540),
        )
    ]


def prepare_voc(
    root: Path, downloads: Path, archives: Sequence[Archive], mirror: str | None = None
) -> None:
    """Complete each archive's part of the layout; skip what is complete."""
    for archive in archives:
        folder, file = root / archive.year, downloads / archive.file
        if _is_complete(folder, archive):
            print(f"{archive.file} is already in {folder}.")
            continue
        if not file.is_file():
            _download(archive, file, mirror)
        if not check_md5(str(file), archive.md5):
            raise KsclError(
                f"{file} is damaged or another file (its md5 is not {archive.md5}); nothing was "
                "unpacked. Delete it and try again."
            )
        _merge(file, folder, archive)


def _is_complete(folder: Path, archive: Archive) -> bool:
    names = folder / "ImageSets" / "Main" / f"{archive.split}.txt"
    ids = names.read_text().split() if names.is_file() else []
    images, boxes = folder / "JPEGImages", folder / "Annotations"
    return len(ids) == archive.count and all(
        (images / f"{i}.jpg").is_file() and (boxes / f"{i}.xml").is_file() for i in ids
    )


def _download(archive: Archive, file: Path, mirror: str | None) -> None:
    url = f"{mirror.rstrip('/')}/{archive.file}" if mirror else archive.url
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".download.") as place:
            download_url(url, place, archive.file, archive.md5)
            (Path(place) / archive.file).replace(file)
    except (OSError, RuntimeError) as error:  # RuntimeError: another hash
        raise KsclError(
            f"{url} could not be downloaded: {error}. Put {archive.file} into {file.parent} "
            "yourself, or give --mirror another server."
        ) from error
    finally:
        socket.setdefaulttimeout(before)


def _merge(file: Path, folder: Path, archive: Archive) -> None:
    """Unpack beside the target and move file by file, the lists of images last."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unpack.") as place:
        try:
            with tarfile.open(file) as content:
                members = progress(content, f"Unpacking {archive.file}")
                content.extractall(place, members, filter="data")
        except (tarfile.TarError, OSError) as error:
            raise KsclError(
                f"{file} cannot be unpacked: {error}. Delete it and try again."
            ) from error
        found = Path(place) / "VOCdevkit" / archive.year
        files = [path for path in found.rglob("*") if path.is_file()]
        for path in sorted(files, key=lambda path: "ImageSets" in path.parts):
            target = folder / path.relative_to(found)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target)
    if not _is_complete(folder, archive):
        raise KsclError(
            f"{folder} is incomplete after unpacking {file}: {archive.split} must have "
            f"{archive.count} images. Delete the folder and try again."
        )


# CIFAR-10 and STL-10 as folders of PNG files, downloaded by torchvision

SUBSET = "suites/small/cifar10_20k.txt"  # which of CIFAR-10's images to use; ships with the configs
# Ranges of each class's 1,800 training images. In total 2,000 to pretrain on, 4,000 to train probes
# on, 2,000 to choose settings on, and 10,000 for final results only.
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
                yield f"{split}/{folder.name}/{path.stem}", fromarray(read_image(path))


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
            found = fromarray(read_image(picture)) if isinstance(picture, Path) else picture
            yield f"{split}/{name}/{seen[name]:04d}", found
        seen[name] += 1
    if left:
        name, index = next(iter(left))
        raise KsclError(
            f"{downloads} has only {seen[name]} images of {name}, but number {index} is needed. "
            "Put all training images of CIFAR-10 there."
        )


def _cifar10(downloads: Path, classes: set[str]) -> Iterator[tuple[str, Image | Path]]:
    """Yield (class, picture or its path), in CIFAR-10's order within each class.

    They come from a copy with one folder per class, sorted by name, or from torchvision.
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
        print(f"{folder} already exists. Delete it to make it again.")
        return folder
    with whole_folder(folder) as place:
        for name, picture in progress(pictures, folder.name, count):
            file = place / f"{name}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            picture.save(file)
    return folder


def check_imagenet(root: Path, num_classes: int) -> str:
    """Describe ImageNet's folder, or raise one KsclError that lists everything wrong with it."""
    problems = []
    counts: dict[str, dict[str, int]] = {}  # images per split and class
    for split in ("train", "val"):
        folder = root / split
        if not folder.is_dir():
            problems.append(f"{folder}: There is no such folder.")
            continue
        entries = list(os.scandir(folder))
        loose = [entry.name for entry in entries if entry.is_file() and is_image(entry.name)]
        counts[split] = {
            name: sum(is_image(entry.name) for entry in os.scandir(folder / name))
            for name in sorted(entry.name for entry in entries if entry.is_dir())
        }
        empty = [name for name, count in counts[split].items() if not count]
        if loose:
            problems.append(
                f"{folder}: {len(loose)} images ({loose[0]} …) are not in class folders. Sort them "
                "by the ground truth of the development kit."
            )
        if len(counts[split]) != num_classes:
            problems.append(f"{folder}: {len(counts[split])} class folders, not {num_classes}.")
        if empty:
            problems.append(
                f"{folder}: no image in {', '.join(empty[:3])} ({len(empty)} in total)."
            )
    if len(counts) == 2 and (names := sorted(counts["train"].keys() ^ counts["val"].keys())):
        problems.append(f"train and val differ in {len(names)} classes: {', '.join(names[:3])} …")
    if problems:
        raise KsclError(f"{root} does not have ImageNet's layout:\n  " + "\n  ".join(problems))
    counted = [f"{sum(count.values()):,} images in {split}" for split, count in counts.items()]
    return f"{root}: {num_classes} classes, {' and '.join(counted)}"
