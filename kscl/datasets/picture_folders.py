"""Public picture sets as folders of PNG files, fetched by torchvision."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from PIL.Image import Image

from kscl.errors import KsclError
from kscl.runtime.logs import progress

Pictures = TypeVar("Pictures")

Named = tuple[str, Image]  # "train/bird/0042", and the picture


def open_set(kind: Callable[..., Pictures], downloads: Path, **which: str) -> Pictures:
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        return kind(str(downloads), download=True, **which)
    except (RuntimeError, OSError) as error:  # urllib's errors are OSErrors
        raise KsclError(
            f"{kind.__name__} could not be fetched or is damaged: {error}. Without a network, put "
            f"torchvision's archive of it into {downloads}"
        ) from error


def write_folder(folder: Path, pictures: Iterable[Named], count: int) -> Path:
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
