"""Photos with small objects are cut into tiles to pretrain on, without those to test on."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from kscl.datasets.own import tiles
from kscl.datasets.own.tiles import LEAST_SIDE, LEFT_OVER, STORED_SIDE, TILES, cut
from tests.helpers.data.photos import jpeg, photo
from tests.helpers.data.sets import annotation_xml
from tests.kscl.datasets.test_own import prepare, split_ids, write_photos, write_xml


def write_scenes(root, count: int, side: int) -> None:
    """Different photos of 320 x 240 pixels, each with an object of this side."""
    for folder in ("photos", "labels"):
        (root / folder).mkdir(parents=True)
    for number in range(count):
        (root / f"photos/p{number}.jpg").write_bytes(jpeg(photo(number, 240, 320)))
        box = ("cat", (11, 21, 10 + side, 20 + side), 0)
        (root / f"labels/p{number}.xml").write_text(annotation_xml([box], (320, 240)))


def test_tiles_are_two_objects_wide_and_of_no_photo_to_test_on(tmp_path, capsys):
    write_scenes(tmp_path, 8, side=40)
    assert prepare(tmp_path) == 0
    files = sorted((tmp_path / "mine" / TILES).iterdir())
    train = split_ids(tmp_path, "pretrain")
    assert len(files) == 12 * len(train)  # 3 x 4 tiles of 80 pixels each
    assert {path.name.rsplit("-", 1)[0] for path in files} == set(train)
    assert not set(train) & set(split_ids(tmp_path, "test"))
    assert f"Tiles to pretrain on: {len(files)}, " in capsys.readouterr().out
    (row,) = [path for path in files if path.name == f"{train[0]}-6.jpg"]
    whole = cv2.imread(str(tmp_path / f"photos/{train[0]}.jpg")).astype(int)
    assert abs(cv2.imread(str(row)) - whole[80:160, 160:240]).mean() < 6  # but for its JPEG


def test_photos_of_large_objects_stay_whole(tmp_path, capsys):
    write_xml(tmp_path / "labels", write_photos(tmp_path / "photos", 12))
    assert prepare(tmp_path) == 0
    assert not (tmp_path / "mine" / TILES).exists()
    assert "Tiles" not in capsys.readouterr().out


def test_there_are_never_too_many_tiles(tmp_path, monkeypatch):
    monkeypatch.setattr(tiles, "MOST_TILES", 20)
    write_scenes(tmp_path, 8, side=40)
    assert prepare(tmp_path) == 0
    train = split_ids(tmp_path, "pretrain")
    found = [path.name.rsplit("-", 1)[0] for path in (tmp_path / "mine" / TILES).iterdir()]
    assert sorted(found) == sorted(name for name in train for _ in range(20 // len(train)))


@pytest.mark.parametrize("size", [(240, 320), (321, 239), (30, 500), (2000, 1000)])
@pytest.mark.parametrize("side", [0.01, 0.3, 0.79])
def test_tiles_cover_the_picture(size, side):
    rows, columns = np.indices(size)
    # A pixel's color tells where it is: red its row, green its column.
    picture = np.stack([rows * 255 / size[0], columns * 255 / size[1], 0 * rows], 2).astype(
        np.uint8
    )
    pixels = min(*size, max(LEAST_SIDE, round(side * min(size))))
    found = list(cut(picture, side))
    assert {tile.shape for tile in found} == {(min(pixels, STORED_SIDE),) * 2 + (3,)}
    for axis, length in enumerate(size):
        spans = {(int(tile[..., axis].min()), int(tile[..., axis].max())) for tile in found}
        seen = np.zeros(256, bool)
        for low, high in spans:
            seen[low : high + 1] = True
        missing = (255 - seen[:255].sum()) * length / 255  # in pixels
        assert missing <= LEFT_OVER * pixels + 0.02 * length
