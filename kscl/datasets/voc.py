"""VOC 2007 and 2012, downloaded, checked and merged into the layout of Detectron2."""

from __future__ import annotations

import shutil
import socket
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchvision.datasets.utils import check_md5, download_url
from torchvision.datasets.voc import DATASET_YEAR_DICT

from kscl.errors import KsclError
from kscl.runtime.logs import progress

TIMEOUT = 60.0  # seconds without a byte; torchvision would wait forever


@dataclass(frozen=True)
class Archive:
    """A file to download and what it holds."""

    url: str
    file: str
    md5: str
    year: str  # the folder it is merged into, VOC2007 or VOC2012
    splits: Mapping[str, int]  # split: number of images, which tells whether a set is complete


def voc_archives() -> list[Archive]:
    """Return torchvision's addresses and hashes, with the image counts of the VOC web pages."""
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


def prepare_voc(
    root: Path, downloads: Path, archives: Sequence[Archive], mirror: str | None = None
) -> None:
    """Complete each archive's part of the layout; leave alone what is complete."""
    for archive in archives:
        folder = root / archive.year
        if _is_complete(folder, archive):
            print(f"{archive.file} is already in {folder}.")
            continue
        file = downloads / archive.file
        if not file.is_file():
            _download(archive, file, mirror)
        _check(file, archive)
        _merge(file, folder, archive)


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
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".download.") as place:
            download_url(url, place, archive.file, archive.md5)
            (Path(place) / archive.file).replace(file)
    except (OSError, RuntimeError) as error:  # RuntimeError: another hash
        raise KsclError(
            f"{url} could not be downloaded: {error}. Fetch {archive.file} some other way and put "
            f"it into {file.parent}, or name a server that has it with --mirror."
        ) from error
    finally:
        socket.setdefaulttimeout(before)


def _check(file: Path, archive: Archive) -> None:
    if not check_md5(str(file), archive.md5):
        raise KsclError(
            f"{file} is damaged or not the file it should be (md5 is not {archive.md5}), so "
            "nothing was unpacked. Delete it and try again."
        )


def _merge(file: Path, folder: Path, archive: Archive) -> None:
    """Unpack beside the target and move file by file; the lists of images come last."""
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
        if not found.is_dir():
            raise KsclError(
                f"{file} holds no folder VOCdevkit/{archive.year}, so it is not VOC's. Delete it."
            )
        files = [path for path in found.rglob("*") if path.is_file()]
        for path in sorted(files, key=lambda path: "ImageSets" in path.parts):
            target = folder / path.relative_to(found)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target)
    if not _is_complete(folder, archive):
        raise KsclError(
            f"{folder} is not complete after unpacking {file}: it should have "
            f"{dict(archive.splits)} images. Delete the folder and try again."
        )
