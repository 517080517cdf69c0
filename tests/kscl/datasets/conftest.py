"""The small drawn data set, drawn once per module."""

from __future__ import annotations

from pathlib import Path

import pytest

from kscl.datasets.shapes import make_shapes
from tests.helpers.data.shapes import SMALL


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "shapes"
    make_shapes(folder, SMALL)
    return folder
