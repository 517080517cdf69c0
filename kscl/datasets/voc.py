"""VOC 2007 and 2012, fetched, checked and merged into the layout that Detectron2 wants."""

from __future__ import annotations

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

from kscl.errors import KsclError
from kscl.runtime.logs import progress

PIECE = 2**20


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
        raise KsclError(
            f"{url} could not be downloaded: {error}. Fetch {archive.file} some other way and put "
            f"it into {file.parent}, or name a server that has it with --mirror."
        ) from error


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
                members = progress(content, f"unpacking {archive.file}")
                content.extractall(place, members, filter="data")
        except (tarfile.TarError, OSError) as error:
            raise KsclError(f"{file} cannot be unpacked: {error}") from error
        found = Path(place) / "VOCdevkit" / archive.year
        if not found.is_dir():
            raise KsclError(f"{file} holds no VOCdevkit/{archive.year}")
        files = [path for path in found.rglob("*") if path.is_file()]
        for path in sorted(files, key=lambda path: "ImageSets" in path.parts):
            target = folder / path.relative_to(found)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target)
    if not _is_complete(folder, archive):
        raise KsclError(
            f"{folder} is not complete after unpacking {file}: it should have "
            f"{dict(archive.splits)} images"
        )
