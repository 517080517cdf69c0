"""Get the public data sets into the layout that the configs expect, or check that they are.

voc       VOC 2007 and 2012: downloaded unless the archives are there, checked by their hashes, and
          merged as Detectron2 wants them (2007's test beside its trainval, in one VOC2007 folder)
imagenet  train/ and val/ with one folder a class: looked at, never changed
cifar10   the 20,000 training images of configs/suites/small/ as cifar10_20k/train and /val, from
          torchvision's archive or a copy of the training images with one folder a class
stl10     as stl10/unlabelled, and /train and /test with one folder a class
"""

from __future__ import annotations

import argparse
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchvision.datasets.utils import check_md5
from torchvision.datasets.voc import DATASET_YEAR_DICT

from detection.errors import DetectionError
from kscl import cli
from kscl.image_source import is_image
from kscl.logs import progress
from kscl.picture_sets import prepare_cifar10_20k, prepare_stl10

EXAMPLES = """  python tools/prepare_data.py voc --root datasets
  python tools/prepare_data.py voc --root datasets --archives /mnt/downloads
  python tools/prepare_data.py imagenet --root /data/imagenet
  python tools/prepare_data.py cifar10 --root datasets --archives /mnt/downloads
then: export DETECTRON2_DATASETS=datasets
"""
PIECE = 2**20
IMAGENET_CLASSES = 1000
PICTURE_SETS = {"cifar10": prepare_cifar10_20k, "stl10": prepare_stl10}


@dataclass(frozen=True)
class Archive:
    url: str
    file: str
    md5: str
    year: str  # the folder it is merged into, VOC2007 or VOC2012
    splits: Mapping[str, int]  # split: number of images, by which a complete set is known


def voc_archives() -> list[Archive]:
    """Addresses and hashes are torchvision's; the counts are those of the VOC web pages."""
    counts = {
        "2007": ("VOC2007", {"trainval": 5011}),
        "2007-test": ("VOC2007", {"test": 4952}),
        "2012": ("VOC2012", {"trainval": 11540}),
    }
    found = []
    for key, (year, splits) in counts.items():
        known = DATASET_YEAR_DICT[key]
        found.append(Archive(known["url"], known["filename"], known["md5"], year, splits))
    return found


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__ or "", EXAMPLES)
    parser.add_argument("what", choices=("voc", "imagenet", *PICTURE_SETS))
    parser.add_argument("--root", type=Path, required=True, help="where the data is, or shall be")
    parser.add_argument(
        "--archives",
        type=Path,
        help="where downloads are kept, or a copy of CIFAR-10 lies (default: --root)",
    )
    parser.add_argument("--mirror", help="an address that has the same files, instead of VOC's own")
    parser.add_argument("--num-classes", type=int, default=IMAGENET_CLASSES, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.what == "imagenet":
        print(check_imagenet(arguments.root, arguments.num_classes))
        return 0
    archives = arguments.archives or arguments.root
    if arguments.what in PICTURE_SETS:
        print(f"ready: {PICTURE_SETS[arguments.what](arguments.root, archives)}")
        return 0
    prepare_voc(arguments.root, archives, voc_archives(), arguments.mirror)
    print(
        f"ready: {arguments.root}/VOC2007 and VOC2012; export DETECTRON2_DATASETS={arguments.root}"
    )
    return 0


def prepare_voc(
    root: Path, downloads: Path, archives: Sequence[Archive], mirror: str | None = None
) -> None:
    """Make every archive's part of the layout complete; what is complete is left alone."""
    for archive in archives:
        folder = root / archive.year
        if _is_complete(folder, archive):
            print(f"{archive.file}: already in {folder}")
            continue
        file = downloads / archive.file
        if not file.is_file():
            _download(archive, file, mirror)
        _check(file, archive)
        _merge(file, folder, archive)


def check_imagenet(root: Path, num_classes: int) -> str:
    """What is there, in words; or an error with everything that is wrong."""
    problems, classes, counts = [], {}, {}
    for split in ("train", "val"):
        folder = root / split
        if not folder.is_dir():
            problems.append(f"{folder}: no such folder")
            continue
        entries = list(os.scandir(folder))
        classes[split] = {entry.name for entry in entries if entry.is_dir()}
        loose = [entry.name for entry in entries if entry.is_file() and is_image(entry.name)]
        if loose:
            problems.append(
                f"{folder}: {len(loose)} images ({loose[0]} …) lie in it, not in a folder of their "
                "class. Sort them by the development kit's ground truth"
            )
        if len(classes[split]) != num_classes:
            problems.append(f"{folder}: {len(classes[split])} class folders, not {num_classes}")
        counts[split] = {
            name: sum(is_image(entry.name) for entry in os.scandir(folder / name))
            for name in sorted(classes[split])
        }
        empty = [name for name, count in counts[split].items() if not count]
        if empty:
            problems.append(f"{folder}: no image in {', '.join(empty[:3])} ({len(empty)} in all)")
    if len(classes) == 2 and classes["train"] != classes["val"]:
        names = sorted(classes["train"] ^ classes["val"])
        problems.append(f"train and val differ in {len(names)} classes: {', '.join(names[:3])} …")
    if problems:
        raise DetectionError(f"{root} is not ImageNet's layout:\n  " + "\n  ".join(problems))
    told = [f"{sum(count.values()):,} images in {split}" for split, count in counts.items()]
    return f"{root}: {num_classes} classes, {' and '.join(told)}"


def _is_complete(folder: Path, archive: Archive) -> bool:
    for split, count in archive.splits.items():
        names = folder / "ImageSets" / "Main" / f"{split}.txt"
        if not names.is_file():
            return False
        ids = names.read_text().split()
        images, boxes = folder / "JPEGImages", folder / "Annotations"
        if len(ids) != count or not all(
            (images / f"{i}.jpg").is_file() and (boxes / f"{i}.xml").is_file() for i in ids
        ):
            return False
    return True


def _download(archive: Archive, file: Path, mirror: str | None) -> None:
    url = f"{mirror.rstrip('/')}/{archive.file}" if mirror else archive.url
    part = file.with_name(f"{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(url, timeout=60) as source, part.open("wb") as target:
            size = int(source.headers.get("Content-Length") or 0)
            pieces = iter(lambda: source.read(PIECE), b"")
            total = -(-size // PIECE) or None
            for piece in progress(pieces, f"{archive.file}, MiB", total):
                target.write(piece)
        part.replace(file)
    except (urllib.error.URLError, OSError) as error:
        part.unlink(missing_ok=True)
        raise DetectionError(
            f"{url} could not be downloaded: {error}. Fetch {archive.file} some other way and put "
            f"it into {file.parent}, or name a server that has it with --mirror."
        ) from error


def _check(file: Path, archive: Archive) -> None:
    if not check_md5(str(file), archive.md5):
        raise DetectionError(
            f"{file} is damaged or not the file it should be (md5 is not {archive.md5}), so "
            "nothing was unpacked. Delete it and try again."
        )


def _merge(file: Path, folder: Path, archive: Archive) -> None:
    """Unpack beside the target and move file by file; the lists of images come last."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unpack.") as place:
        try:
            with tarfile.open(file) as content:
                members = progress(content, f"unpacking {archive.file}")
                content.extractall(place, members, filter="data")
        except (tarfile.TarError, OSError) as error:
            raise DetectionError(f"{file} cannot be unpacked: {error}") from error
        found = Path(place) / "VOCdevkit" / archive.year
        if not found.is_dir():
            raise DetectionError(f"{file} holds no VOCdevkit/{archive.year}")
        files = [path for path in found.rglob("*") if path.is_file()]
        for path in sorted(files, key=lambda path: "ImageSets" in path.parts):
            target = folder / path.relative_to(found)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target)
    if not _is_complete(folder, archive):
        raise DetectionError(
            f"{folder} is not complete after unpacking {file}: it should have "
            f"{dict(archive.splits)} images"
        )
