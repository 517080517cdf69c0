"""A small set is decoded once; what a run sees does not change by it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kscl.data import view_dataset
from kscl.data.loader import load_in_workers
from kscl.data.open import open_source
from kscl.data.view_dataset import ViewDataset
from kscl.views.recipes import MOCO_V2
from tests.helpers.data.sets import write_image

IMAGES, SIDE = 8, 64
MEGABYTES = IMAGES * SIDE * SIDE * 3 / 2**20  # what they all take


@pytest.fixture
def folder(tmp_path) -> Path:
    for number in range(IMAGES):
        write_image(tmp_path / "images" / f"{number}.png", number, (SIDE, SIDE))
    return tmp_path / "images"


@pytest.fixture
def decoded(monkeypatch) -> list[int]:
    """Return the indices of the images that are decoded from here on."""
    seen: list[int] = []
    original = view_dataset.read_decoded

    def read(source, index, *rest):
        seen.append(index)
        return original(source, index, *rest)

    monkeypatch.setattr(view_dataset, "read_decoded", read)
    return seen


def dataset(folder: Path, megabytes: float, **more) -> ViewDataset:
    return ViewDataset(
        open_source(str(folder)), MOCO_V2, 3, 32, 0, keep_megabytes=megabytes, **more
    )


def epochs(data: ViewDataset, count: int) -> list[torch.Tensor]:
    return [data.__getitems__([(e, i) for i in range(IMAGES)]).views for e in range(count)]


def test_a_set_that_fits_is_decoded_once_and_gives_the_same_views(folder, decoded):
    plain = epochs(dataset(folder, 0), 3)
    assert len(decoded) == 3 * IMAGES
    decoded.clear()
    kept = epochs(dataset(folder, MEGABYTES), 3)
    assert sorted(decoded) == list(range(IMAGES))
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))


def test_of_a_set_that_does_not_fit_nothing_is_kept(folder):
    data = dataset(folder, 0.9 * MEGABYTES)
    epochs(data, 1)
    assert not data.kept.pictures


def test_images_larger_than_the_first_ones_do_not_exceed_the_room(tmp_path):
    for number in range(IMAGES):
        side = SIDE if number < 2 else 4 * SIDE
        write_image(tmp_path / f"{number}.png", number, (side, side))
    data = dataset(tmp_path, MEGABYTES)
    epochs(data, 2)
    assert sum(each.picture.nbytes for each in data.kept.pictures.values()) <= MEGABYTES * 2**20


def test_a_reduced_picture_is_not_kept_as_it_serves_one_epoch(folder):
    data = dataset(folder, MEGABYTES, reduced_decode=True)
    epochs(data, 1)
    assert not data.kept.pictures


def test_an_image_that_cannot_be_read_is_reported_in_every_epoch(folder):
    (folder / "3.png").write_bytes(b"no image")
    data = dataset(folder, MEGABYTES)
    for epoch in range(2):
        assert [index for index, _ in data.__getitems__([(epoch, 3)]).bad] == [3]


def test_workers_share_the_room_and_give_the_same_views(folder):
    wanted = [[(e, i), (e, i + 1)] for e in range(2) for i in range(0, IMAGES, 2)]
    for megabytes in (MEGABYTES, 2 * MEGABYTES):
        alone = [b.views for b in load_in_workers(dataset(folder, megabytes), wanted, 0)]
        shared = [b.views for b in load_in_workers(dataset(folder, megabytes), wanted, 2)]
        assert all(np.array_equal(a, b) for a, b in zip(alone, shared, strict=True))
