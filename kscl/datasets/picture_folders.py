"""Public picture sets as folders of PNG files, downloaded by torchvision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from PIL.Image import Image

from kscl.errors import KsclError
from kscl.runtime.files import whole_folder
from kscl.runtime.logs import progress

Pictures = TypeVar("Pictures")

Named = tuple[str, Image]  # "train/bird/0042", and the picture


def open_set(kind: Callable[..., Pictures], downloads: Path, **which: str) -> Pictures:
    """Return a data set of torchvision, downloaded if it is not there."""
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        return kind(str(downloads), download=True, **which)
    except (RuntimeError, OSError) as error:  # urllib's errors are OSErrors
        raise KsclError(
            f"{kind.__name__} could not be downloaded or is damaged: {error}. Without a network, "
            f"put torchvision's archive of it into {downloads}."
        ) from error


def write_folder(folder: Path, pictures: Iterable[Named], count: int) -> Path:
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
