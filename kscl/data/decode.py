"""Decode an image file of any kind into an upright uint8 RGB picture.

Pillow reads the header, which decides whether the file is decoded at all. OpenCV decodes; it is
the fastest and gets gray, palette, 16-bit, CMYK and EXIF-rotated files right. What it refuses is
shown to Pillow, which reads a few kinds more and can say what is wrong. Transparency is dropped,
as torchvision's loaders do.
"""

from __future__ import annotations

import io

import cv2
import numpy as np
from PIL import Image, ImageOps

from kscl.data.formats import MAX_PIXELS, UnreadableImage, check_depth, open_image
from kscl.data.source import ImageSource

# A broken file is reported by us, by name; OpenCV's warning does not know the name.
_set_log_level = getattr(cv2, "setLogLevel", None) or cv2.utils.logging.setLogLevel  # OpenCV 4, 5
_set_log_level(2)  # errors


def read_picture(source: ImageSource, index: int, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read and decode one image of a source; every way to fail is an UnreadableImage."""
    try:
        data = source.read(index)
    except OSError as error:
        raise UnreadableImage(error.strerror or str(error)) from error
    return decode_image(data, max_pixels)


def decode_image(data: bytes, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Return (height, width, 3), uint8, RGB, turned as its EXIF orientation says."""
    if not data:
        raise UnreadableImage("the file is empty")
    with open_image(io.BytesIO(data), max_pixels) as image:
        check_depth(image)
        try:
            picture = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
        except cv2.error:
            picture = None
        return _to_rgb(ImageOps.exif_transpose(image)) if picture is None else picture


def _to_rgb(image: Image.Image) -> np.ndarray:
    if image.mode.startswith("I"):
        # Pillow's own conversion cuts 16-bit values off at 255 instead of scaling them.
        gray = (np.asarray(image).astype(np.float64) * (255 / 65535)).round().clip(0, 255)
        return np.repeat(gray.astype(np.uint8)[..., None], 3, axis=2)
    return np.array(image.convert("RGB"))
