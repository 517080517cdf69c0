"""STL-10 as folders of pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchvision.datasets import STL10

from kscl.datasets.picture_folders import Named, open_set, write_folder


def prepare_stl10(root: Path, downloads: Path) -> Path:
    """Write `root/stl10/unlabeled`, and `train` and `test` with one folder per class."""
    return write_folder(root / "stl10", _stl10(downloads), 113_000)


def _stl10(downloads: Path) -> Iterator[Named]:
    for split in ("unlabeled", "train", "test"):
        pictures = open_set(STL10, downloads, split=split)
        for index, (picture, label) in enumerate(pictures):
            under = f"{split}/{pictures.classes[label]}" if label >= 0 else split
            yield f"{under}/{index:06d}", picture
