"""Data sets that are registered for one test."""

from __future__ import annotations

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from detection.data.catalog import register_voc_folder


@pytest.fixture
def registered():
    """Registers VOC folders for one test and forgets them after it."""
    names = []

    def register(root, classes, split="test"):
        name = f"test_{len(names)}_{root}"
        register_voc_folder(name, root, split, classes)
        names.append(name)
        return name

    yield register
    for name in names:
        DatasetCatalog.remove(name)
        MetadataCatalog.pop(name, None)
