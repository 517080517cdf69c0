"""Read an image of a source, or the bytes of an image file, as an upright uint8 RGB picture."""

from __future__ import annotations

import io

import numpy as np

from kscl.data.formats import (
    FORMATS,
    MAX_PIXELS,
    Decoded,
    Reduction,
    UnreadableImage,
    decode_whole,
    open_image,
)
from kscl.data.source import ImageSource


def read_picture(source: ImageSource, index: int, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read and decode one image of a source; every way to fail is an UnreadableImage."""
    return read_decoded(source, index, max_pixels).picture


def read_decoded(
    source: ImageSource,
    index: int,
    max_pixels: int = MAX_PIXELS,
    reduction: Reduction | None = None,
) -> Decoded:
    """Do the same, at reduced size where the format allows."""
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
    """Decode an image, at reduced size where `reduction` is given and the format allows it."""
    if not data:
        raise UnreadableImage("the file is empty")
    with open_image(io.BytesIO(data), max_pixels) as image:
        known = FORMATS.get(image.format or "")
        # Pillow opens a JPEG with a second picture behind it as MPO, which has no plugin.
        return (known.decode if known else decode_whole)(data, image, reduction)
