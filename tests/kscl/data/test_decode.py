"""Every kind of image file comes out upright, as RGB; what is broken is refused with a reason.

What a header says is enough to refuse a file: nothing is decoded and no program is started. Large
JPEGs can be decoded at a fraction of their size, for nearly the same views.
"""

from __future__ import annotations

import io
import os
import struct
import zlib

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image, ImageOps

from kscl.data import formats
from kscl.data import source as data_source
from kscl.data.annotations import image_size
from kscl.data.formats import (
    FORMATS,
    MAX_PIXELS,
    UnreadableImage,
    decode,
    decode_image,
    decode_whole,
    image_format,
)
from kscl.data.loader import ViewDataset
from kscl.data.open import open_source
from kscl.data.source import read_picture
from kscl.errors import KsclError
from kscl.views.batch import SmallViews
from kscl.views.recipes import MOCO_V2
from tests.helpers.data.photos import jpeg, photo

PICTURE = photo(3, 60, 90)
RGB = Image.fromarray(PICTURE)
RAMP = Image.fromarray(np.tile(np.linspace(0, 255, 90).astype(np.uint8), (60, 1)))


def encode(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def encode_16_bit(values, kind=".png"):
    return cv2.imencode(kind, values.astype(np.uint16))[1].tobytes()


def with_alpha(image):
    image = image.copy()
    image.putalpha(RAMP)
    return image


def as_torchvision_loads(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


ORDINARY = {
    "JPEG": encode(RGB, "JPEG"),
    "progressive JPEG": encode(RGB, "JPEG", progressive=True),
    "JPEG without subsampling": encode(RGB, "JPEG", subsampling=0),
    "gray JPEG": encode(RGB.convert("L"), "JPEG"),
    "PNG": encode(RGB, "PNG"),
    "gray PNG": encode(RGB.convert("L"), "PNG"),
    "black and white PNG": encode(RGB.convert("1"), "PNG"),
    "palette PNG": encode(RGB.convert("P"), "PNG"),
    "palette PNG of 4 bits": encode(RGB.quantize(16), "PNG", bits=4),
    "palette PNG with a transparent color": encode(RGB.convert("P"), "PNG", transparency=3),
    "PNG with alpha": encode(with_alpha(RGB), "PNG"),
    "gray PNG with alpha": encode(with_alpha(RGB.convert("L")), "PNG"),
    "WebP": encode(RGB, "WEBP"),
    "lossless WebP": encode(RGB, "WEBP", lossless=True),
    "WebP with alpha": encode(with_alpha(RGB), "WEBP", lossless=True),
    "BMP": encode(RGB, "BMP"),
    "TIFF": encode(RGB, "TIFF"),
    "PPM": encode(RGB, "PPM"),
}


ENCODED = [encode(RGB, kind) for kind in FORMATS]


@pytest.mark.parametrize("kind", ORDINARY)
@pytest.mark.smoke
def test_an_ordinary_file_gives_the_pixels_that_torchvisions_loader_gives(kind):
    picture = decode_image(ORDINARY[kind])
    assert picture.dtype == np.uint8
    assert np.array_equal(picture, as_torchvision_loads(ORDINARY[kind]))


def test_cmyk_is_turned_into_the_colors_it_stands_for():
    data = encode(RGB.convert("CMYK"), "JPEG", quality=95)
    assert np.abs(decode_image(data).astype(int) - as_torchvision_loads(data)).mean() < 1.5
    assert np.abs(decode_image(data).astype(int) - PICTURE).mean() < 5


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_photo_taken_with_a_turned_camera_comes_out_upright(kind):
    for orientation in range(1, 9):
        data = encode(RGB, kind, exif=turned(orientation))
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert np.array_equal(decode_image(data), np.asarray(upright)), orientation


@pytest.mark.parametrize("kind", [".png", ".tiff"])
def test_16_bits_are_scaled_to_8_and_not_cut_off(kind):
    gray = np.asarray(RGB.convert("L"))
    assert np.array_equal(decode_image(encode_16_bit(gray * 257.0, kind)), np.dstack([gray] * 3))
    assert np.array_equal(decode_image(encode_16_bit(PICTURE[..., ::-1] * 257.0, kind)), PICTURE)


def test_the_second_opinion_agrees_where_opencv_refuses(monkeypatch):
    expected = {kind: decode_image(data) for kind, data in ORDINARY.items()}
    gray16 = encode_16_bit(np.asarray(RGB.convert("L")) * 257.0)
    expected_grey16 = decode_image(gray16)
    monkeypatch.setattr(cv2, "imdecode", lambda data, flags: None)
    for kind, picture in expected.items():
        assert np.array_equal(decode_image(ORDINARY[kind]), picture), kind
    assert np.array_equal(decode_image(gray16), expected_grey16)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"\0" * 500, "not an image"),
        (b"<html>404</html>", "not an image"),
        (ORDINARY["JPEG"][:300], ""),
        (ORDINARY["PNG"][:100], "truncated"),
        (ORDINARY["WebP"][:100], ""),
    ],
)
def test_what_is_no_image_is_refused_with_a_reason(data, reason):
    with pytest.raises(UnreadableImage) as caught:
        decode_image(data)
    assert str(caught.value)
    assert reason in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(sorted(ORDINARY)), share=st.floats(0, 0.98))
def test_a_truncated_file_is_refused_unless_all_its_pixels_are_there(kind, share):
    data = ORDINARY[kind]
    try:
        picture = decode_image(data[: int(share * len(data))])
    except UnreadableImage:
        return
    assert share > 0.97  # of a short file, not much more than its end mark
    assert np.array_equal(picture, decode_image(data))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(sorted(ORDINARY)), st.integers(0, 3000))
def test_damaged_bytes_give_a_picture_or_a_reason_but_no_crash(noise, kind, place):
    data = ORDINARY[kind]
    try:
        picture = decode_image(data[:place] + noise + data[place + len(noise) :])
    except UnreadableImage:
        return
    assert picture.dtype == np.uint8
    assert picture.ndim == 3


EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 20 20
%%EndComments
newpath 0 0 moveto 20 20 lineto stroke
showpage
%%EOF
"""


def chunk(name, content):
    return (
        struct.pack(">I", len(content))
        + name
        + content
        + struct.pack(">I", zlib.crc32(name + content))
    )


def black_png(width, height):
    """A whole PNG of one bit per pixel, made row by row."""
    packer = zlib.compressobj(9)
    row = b"\0" * (1 + -(-width // 8))
    body = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", body), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.fixture
def nothing_is_decoded(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a pixel was decoded")

    monkeypatch.setattr(cv2, "imdecode", refuse)
    monkeypatch.setattr(Image.Image, "convert", refuse)


def test_a_small_file_of_many_pixels_is_refused_by_its_header(nothing_is_decoded):
    bomb = black_png(30_000, 30_000)
    assert len(bomb) < 900_000
    with pytest.raises(UnreadableImage, match=r"DATA\.MAX_PIXELS"):
        decode_image(bomb)


def test_the_limit_is_the_number_of_pixels_for_every_kind(nothing_is_decoded):
    assert MAX_PIXELS == 2 * Image.MAX_IMAGE_PIXELS  # where Pillow itself stops
    for data in ENCODED:
        with pytest.raises(UnreadableImage, match="90 x 60"):
            decode_image(data, max_pixels=90 * 60 - 1)


def test_an_image_of_just_the_allowed_size_is_read():
    assert decode_image(ORDINARY["JPEG"], max_pixels=90 * 60).shape == (60, 90, 3)


def test_postscript_named_like_a_photo_starts_no_ghostscript(monkeypatch, tmp_path):
    def started(*arguments, **options):
        raise AssertionError("Ghostscript was started")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", started)
    with pytest.raises(UnreadableImage, match="not an image"):
        decode_image(EPS)
    (tmp_path / "photo.jpg").write_bytes(EPS)
    with pytest.raises(UnreadableImage, match="not an image"):
        image_size(tmp_path / "photo.jpg", decode=True)


@pytest.mark.parametrize(
    "pixels",
    [
        np.random.default_rng(0).random((20, 30), np.float32),
        np.random.default_rng(0).random((20, 30, 3), np.float32),
        np.random.default_rng(0).random((20, 30)),
        np.random.default_rng(0).integers(0, 2**31, (20, 30), np.int32),
    ],
    ids=["gray floats", "color floats", "doubles", "32-bit integers"],
)
def test_a_tiff_whose_white_is_unknown_is_refused_and_not_read_as_black(pixels):
    with pytest.raises(UnreadableImage, match=r"floating-point|32-bit integers"):
        decode_image(cv2.imencode(".tiff", pixels)[1].tobytes())


def test_what_follows_the_picture_in_a_jpeg_is_ignored():
    data = encode(RGB, "MPO", save_all=True, append_images=[RGB.rotate(180)])
    assert np.array_equal(decode_image(data), as_torchvision_loads(data))
    assert np.array_equal(decode_image(jpeg(PICTURE) + b"\0" * 100), decode_image(jpeg(PICTURE)))


def test_a_new_format_is_known_to_folders_headers_and_decoding(tmp_path, cache, monkeypatch):
    (tmp_path / "a.pcx").write_bytes(encode(RGB, "PCX"))
    (tmp_path / "b.png").write_bytes(ORDINARY["PNG"])
    os.utime(tmp_path, (1e9, 1e9))  # so that its index is cached
    assert len(open_source(str(tmp_path))) == 1
    monkeypatch.setattr(FORMATS, "data", dict(FORMATS.data))
    monkeypatch.setattr(formats, "IMAGE_EXTENSIONS", extensions := [*formats.IMAGE_EXTENSIONS])
    monkeypatch.setattr(data_source, "IMAGE_EXTENSIONS", extensions)
    image_format("PCX", ".pcx")(decode_whole)
    source = open_source(str(tmp_path))
    assert len(source) == 2
    assert np.array_equal(read_picture(source, 0), PICTURE)
    assert image_size(tmp_path / "a.pcx") == (90, 60)
    with pytest.raises(UnreadableImage, match="90 x 60"):
        read_picture(source, 0, max_pixels=1)
    with pytest.raises(KsclError, match="PCX"):
        image_format("PCX")(decode_whole)


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


CROP = {"op": "random_resized_crop", "scale": [0.2, 1.0]}
BLUR = {"op": "gaussian_blur", "sigma": [30.0, 30.0], "p": 1.0}  # as wide as in the whole picture


@pytest.mark.parametrize("recipe", [MOCO_V2, [BLUR, CROP]], ids=["moco_v2", "blur before crop"])
def test_views_differ_by_little_and_are_made_of_fewer_pixels(folder, recipe):
    whole, reduced = both(folder, recipe=recipe)
    for index in range(2):
        image, _, _ = reduced.read_picture(0, index)
        assert (image.height, image.width) == (HEIGHT, WIDTH)
        assert len(image.picture) * 4 <= HEIGHT + 4  # at least by four at this size
        difference = (whole[0, index].views.float() - reduced[0, index].views.float()).abs()
        assert difference.mean() < 3  # crops are rounded to whole pixels of the reduced picture


def test_no_crop_has_to_grow_because_of_it(folder):
    """A small query of little of the image needs more of its pixels than the other views do."""
    _, reduced = both(folder)
    _, with_small = both(folder, small=SmallViews(2, 96, (0.01, 0.02)))
    for index in range(3):
        assert len(reduced.read_picture(0, index)[0].picture) < HEIGHT
        assert len(with_small.read_picture(0, index)[0].picture) == HEIGHT


def test_small_images_and_other_kinds_of_files_are_not_reduced(folder):
    assert decode(ORDINARY["PNG"], reduction=lambda height, width: 8).picture.shape == (60, 90, 3)
    whole, reduced = both(folder, size=600)
    for index in range(3):
        assert torch.equal(whole[0, index].views, reduced[0, index].views)


@pytest.mark.parametrize(("by", "orientation"), [(2, 1), (4, 3), (8, 6), (2, 8), (4, 5), (8, 2)])
def test_a_turned_photo_is_upright_however_much_it_is_reduced(by, orientation):
    data = encode(Image.fromarray(photo(1)), "JPEG", exif=turned(orientation), quality=95)
    asked = []

    def reduction(height, width):
        asked.append((height, width))
        return by

    image, upright = decode(data, reduction=reduction), decode_image(data)
    assert asked == [upright.shape[:2]] == [(image.height, image.width)]
    height, width = upright.shape[:2]
    assert image.picture.shape[:2] == (-(-height // by), -(-width // by))
    expected = cv2.resize(upright, image.picture.shape[1::-1], interpolation=cv2.INTER_AREA)
    assert np.abs(image.picture.astype(int) - expected).mean() < 10
    assert np.abs(image.picture[::-1].astype(int) - expected).mean() > 20
