"""Decode an image file of any kind into an upright uint8 RGB picture.

Pillow reads the header, which decides whether the file is decoded at all. OpenCV decodes; it is
the fastest and gets gray, palette, 16-bit, CMYK and EXIF-rotated files right. What it refuses is
shown to Pillow, which reads a few kinds more and can say what is wrong. Transparency is dropped,
as torchvision's loaders do.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image, ImageOps

from kscl.data.formats import MAX_PIXELS, UnreadableImage, check_depth, open_image
from kscl.data.source import ImageSource

# A broken file is reported by us, by name; OpenCV's warning does not know the name.
_set_log_level = getattr(cv2, "setLogLevel", None) or cv2.utils.logging.setLogLevel  # OpenCV 4, 5
_set_log_level(2)  # errors


# By what libjpeg can divide width and height while it decodes, at a fraction of the time. Pillow's
# draft mode gives the same pixels, no faster.
REDUCED = {
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}
Reduction = Callable[[int, int], int]  # 1, 2, 4 or 8, from the upright height and width
ORIENTATION = 0x0112  # of EXIF; from 5 on, width and height change places


class Decoded(NamedTuple):
    """A picture, and the size that it has or, if it was reduced, had."""

    picture: np.ndarray  # (h, w, 3), uint8, RGB
    height: int
    width: int


def read_picture(source: ImageSource, index: int, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read and decode one image of a source; every way to fail is an UnreadableImage."""
    return read_decoded(source, index, max_pixels).picture


def read_decoded(
    source: ImageSource,
    index: int,
    max_pixels: int = MAX_PIXELS,
    reduction: Reduction | None = None,
) -> Decoded:
    """Do the same, but reduce a JPEG by what `reduction` returns."""
    try:
        data = source.read(index)
    except OSError as error:
        raise UnreadableImage(error.strerror or str(error)) from error
    return decode(data, max_pixels, reduction)


def decode_image(data: bytes, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Return (height, width, 3), uint8, RGB, turned as its EXIF orientation says."""
    return decode(data, max_pixels).picture


def decode(
    data: bytes, max_pixels: int = MAX_PIXELS, reduction: Reduction | None = None
) -> Decoded:
    """Decode an image, a JPEG by `reduction` of its size if that is given."""
    if not data:
        raise UnreadableImage("the file is empty")
    with open_image(io.BytesIO(data), max_pixels) as image:
        check_depth(image)
        if reduction is not None and image.format == "JPEG":
            width, height = image.size
            if image.getexif().get(ORIENTATION, 1) >= 5:
                width, height = height, width
            by = reduction(height, width)
            if by > 1 and (small := _decode_reduced(data, height, width, by)) is not None:
                return Decoded(small, height, width)
        try:
            picture = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
        except cv2.error:
            picture = None
        if picture is None:
            picture = _to_rgb(ImageOps.exif_transpose(image))
        return Decoded(picture, *picture.shape[:2])


def _decode_reduced(data: bytes, height: int, width: int, by: int) -> np.ndarray | None:
    """Return the picture if it is what its header promised."""
    try:
        picture = cv2.imdecode(np.frombuffer(data, np.uint8), REDUCED[by])
    except cv2.error:
        return None
    if picture is None or picture.shape[:2] != (-(-height // by), -(-width // by)):
        return None
    return cv2.cvtColor(picture, cv2.COLOR_BGR2RGB, dst=picture)


def _to_rgb(image: Image.Image) -> np.ndarray:
    if image.mode.startswith("I"):
        # Pillow's own conversion cuts 16-bit values off at 255 instead of scaling them.
        gray = (np.asarray(image).astype(np.float64) * (255 / 65535)).round().clip(0, 255)
        return np.repeat(gray.astype(np.uint8)[..., None], 3, axis=2)
    return np.array(image.convert("RGB"))
