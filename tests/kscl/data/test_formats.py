"""What a header says is enough to refuse a file; nothing is decoded and no program is started."""

from __future__ import annotations

import io
import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from kscl.data import decode
from kscl.data.annotated.image_size import image_size
from kscl.data.decode import decode_image
from kscl.data.formats import FORMATS, MAX_PIXELS, UnreadableImage
from kscl.errors import KsclError
from tests.helpers.data.photos import jpeg, photo

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

    monkeypatch.setattr(decode.cv2, "imdecode", refuse)
    monkeypatch.setattr(Image.Image, "convert", refuse)


def test_a_small_file_of_many_pixels_is_refused_by_its_header(nothing_is_decoded):
    bomb = black_png(30_000, 30_000)
    assert len(bomb) < 900_000
    with pytest.raises(UnreadableImage, match=r"DATA\.MAX_PIXELS"):
        decode_image(bomb)


def encode(kind):
    file = io.BytesIO()
    Image.fromarray(photo(0, 40, 50)).save(file, kind)
    return file.getvalue()


ENCODED = {kind: encode(kind) for kind in FORMATS}


@pytest.mark.parametrize("kind", FORMATS)
def test_the_limit_is_the_number_of_pixels_for_every_kind(kind, nothing_is_decoded):
    with pytest.raises(UnreadableImage, match="50 x 40"):
        decode_image(ENCODED[kind], max_pixels=1999)


def test_an_image_of_just_the_allowed_size_is_read():
    assert decode_image(jpeg(photo(0, 40, 50)), max_pixels=2000).shape == (40, 50, 3)
    assert decode_image(black_png(4000, 3000)).shape == (3000, 4000, 3)


def test_pillow_refuses_nothing_that_the_default_limit_allows():
    assert MAX_PIXELS == 2 * Image.MAX_IMAGE_PIXELS


def test_postscript_named_like_a_photo_starts_no_ghostscript(monkeypatch, tmp_path):
    def started(*arguments, **options):
        raise AssertionError("Ghostscript was started")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", started)
    with pytest.raises(UnreadableImage, match="not an image"):
        decode_image(EPS)
    (tmp_path / "photo.jpg").write_bytes(EPS)
    with pytest.raises(KsclError, match="not an image"):
        image_size(tmp_path / "photo.jpg", decode=True)


def test_the_allowed_formats_run_in_this_process_alone():
    assert "EPS" not in FORMATS
    Image.init()
    for name in FORMATS:
        assert name in Image.OPEN


def tiff(pixels):
    return cv2.imencode(".tiff", pixels)[1].tobytes()


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
        decode_image(tiff(pixels))
