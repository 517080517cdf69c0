"""Large JPEGs decoded at a fraction of their size: nearly the same views, no fewer pixels."""

from __future__ import annotations

import io

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from kscl.config.merge import load_config
from kscl.config.tree import config_hash
from kscl.data.decode import decode, decode_image
from kscl.data.open import open_source
from kscl.data.view_dataset import SmallViews, ViewDataset
from kscl.views.recipes import MOCO_V2
from tests.helpers.data.photos import jpeg, photo

HEIGHT, WIDTH, SIZE = 1125, 1500, 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    for number in range(3):
        large = cv2.resize(photo(number), (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
        (root / f"{number}.jpg").write_bytes(jpeg(large))
    return open_source(str(root))


def both(folder, size=SIZE, recipe=MOCO_V2, **more):
    """Return the data set with full and with reduced decode."""
    return [
        ViewDataset(folder, recipe, 3, size, 0, reduced_decode=reduced, **more)
        for reduced in (False, True)
    ]


def test_views_differ_by_little_and_are_made_of_fewer_pixels(folder):
    whole, reduced = both(folder)
    for index in range(3):
        image, _, _ = reduced.read_picture(0, index)
        assert (image.height, image.width) == (HEIGHT, WIDTH)
        assert len(image.picture) * 4 <= HEIGHT + 4  # at least by four at this size
        difference = (whole[0, index].views.float() - reduced[0, index].views.float()).abs()
        assert difference.mean() < 3  # crops are rounded to whole pixels of the reduced picture


def test_a_blur_before_the_crop_is_as_wide_as_in_the_whole_picture(folder):
    blur = {"op": "gaussian_blur", "sigma": [30.0, 30.0], "p": 1.0}
    recipe = [blur, {"op": "random_resized_crop", "scale": [0.2, 1.0]}]
    whole, reduced = both(folder, recipe=recipe)
    for index in range(3):
        assert len(reduced.read_picture(0, index)[0].picture) * 4 <= HEIGHT + 4
        difference = (whole[0, index].views.float() - reduced[0, index].views.float()).abs()
        assert difference.mean() < 3


def test_no_crop_has_to_grow_because_of_it(folder):
    """A small query of little of the image needs more of its pixels than the other views do."""
    _, reduced = both(folder)
    _, with_small = both(folder, small=SmallViews(2, 96, (0.01, 0.02)))
    for index in range(3):
        assert len(reduced.read_picture(0, index)[0].picture) < HEIGHT
        assert len(with_small.read_picture(0, index)[0].picture) == HEIGHT


def test_small_images_are_not_changed_at_all(folder):
    whole, reduced = both(folder, size=600)
    for index in range(3):
        assert torch.equal(whole[0, index].views, reduced[0, index].views)


@pytest.mark.parametrize("by", [2, 4, 8])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_photo_is_upright_however_much_it_is_reduced(by, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(photo(1)).save(file, "JPEG", exif=exif, quality=95)
    asked = []

    def reduction(height, width):
        asked.append((height, width))
        return by

    image, upright = decode(file.getvalue(), reduction=reduction), decode_image(file.getvalue())
    assert asked == [upright.shape[:2]] == [(image.height, image.width)]
    height, width = upright.shape[:2]
    assert image.picture.shape[:2] == (-(-height // by), -(-width // by))
    expected = cv2.resize(upright, image.picture.shape[1::-1], interpolation=cv2.INTER_AREA)
    assert np.abs(image.picture.astype(int) - expected).mean() < 10
    assert np.abs(image.picture[::-1].astype(int) - expected).mean() > 20


def test_other_kinds_of_files_are_decoded_whole():
    _, data = cv2.imencode(".png", photo(2))
    image = decode(data.tobytes(), reduction=lambda height, width: 8)
    assert image.picture.shape == (375, 500, 3)


def test_the_setting_is_part_of_the_hash():
    off, on = (load_config(None, ["DATA.REDUCED_DECODE", word]) for word in ("False", "True"))
    assert config_hash(off) != config_hash(on)
