"""Every kind of image file comes out upright, as RGB; what is broken is refused with a reason."""

from __future__ import annotations

import io

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from kscl.data import decode
from kscl.data.decode import UnreadableImage, decode_image
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


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_photo_taken_with_a_turned_camera_comes_out_upright(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(RGB, kind, exif=exif.tobytes())
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(decode_image(data), np.asarray(upright))


@pytest.mark.parametrize("kind", [".png", ".tiff"])
def test_16_bits_are_scaled_to_8_and_not_cut_off(kind):
    gray = np.asarray(RGB.convert("L"))
    assert np.array_equal(decode_image(encode_16_bit(gray * 257.0, kind)), np.dstack([gray] * 3))
    assert np.array_equal(decode_image(encode_16_bit(PICTURE[..., ::-1] * 257.0, kind)), PICTURE)


def test_the_second_opinion_agrees_where_opencv_refuses(monkeypatch):
    expected = {kind: decode_image(data) for kind, data in ORDINARY.items()}
    gray16 = encode_16_bit(np.asarray(RGB.convert("L")) * 257.0)
    expected_grey16 = decode_image(gray16)
    monkeypatch.setattr(decode.cv2, "imdecode", lambda data, flags: None)
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


def test_bytes_after_the_end_of_a_jpeg_do_no_harm():
    data = jpeg(PICTURE)
    assert np.array_equal(decode_image(data + b"\0" * 100), decode_image(data))
