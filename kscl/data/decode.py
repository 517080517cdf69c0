"""Bytes of an image file in, an upright uint8 RGB picture out, whatever kind of file it was.

OpenCV decodes; it is the fastest and gets grey, palette, 16-bit, CMYK and EXIF-rotated files
right. What it refuses is shown to PIL, which reads a few kinds more and can say what is wrong.
Transparency is dropped, as torchvision's loaders do.
"""

from __future__ import annotations

import io

import cv2
import numpy as np
from PIL import Image, ImageOps

IMAGE_EXTENSIONS = (
    ".jpg",
    ".jpeg",
    ".jpe",
    ".png",
    ".webp",
    ".bmp",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
)

# A broken file is reported by us, by name; OpenCV's warning does not know the name.
_set_log_level = getattr(cv2, "setLogLevel", None) or cv2.utils.logging.setLogLevel  # OpenCV 4, 5
_set_log_level(2)  # errors


class UnreadableImage(Exception):
    """The bytes are no whole image; the message is the reason."""


def decode_image(data: bytes) -> np.ndarray:
    """(height, width, 3), uint8, RGB, turned as its EXIF orientation says."""
    if not data:
        raise UnreadableImage("the file is empty")
    try:
        picture = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    except cv2.error:
        picture = None
    return _decode_with_pil(data) if picture is None else picture


def _decode_with_pil(data: bytes) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(data)) as image:
            return _to_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # PIL's decoders raise whatever they trip over
        raise UnreadableImage(_reason(error)) from error


def _to_rgb(image: Image.Image) -> np.ndarray:
    if image.mode.startswith("I"):
        # PIL's own conversion cuts 16-bit values off at 255 instead of scaling them.
        grey = (np.asarray(image).astype(np.float64) * (255 / 65535)).round().clip(0, 255)
        return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2)
    return np.array(image.convert("RGB"))


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return "it is not an image of a known kind"
    return str(error) or type(error).__name__
