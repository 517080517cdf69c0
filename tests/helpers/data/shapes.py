"""A small drawn data set."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kscl.datasets.shapes import ShapesSettings

SMALL = ShapesSettings(
    seed=7,
    unlabeled=20,
    train=20,
    val=20,
    detection_train=8,
    detection_test=8,
    image_size=48,
    detection_size=96,
)


def bytes_of(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
