"""What the tests of data sets share: Detectron2's catalogs, as they were before each test."""

from __future__ import annotations

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog


@pytest.fixture(autouse=True)
def catalogs_as_they_were():
    before = dict(DatasetCatalog), dict(MetadataCatalog)
    yield
    for catalog, entries in zip((DatasetCatalog, MetadataCatalog), before, strict=True):
        catalog.clear()
        catalog.update(entries)
