"""The size of an image file as Detectron2 sees it, and whether it decodes."""

from __future__ import annotations

import warnings
from pathlib import Path

from PIL import Image

from kscl.errors import KsclError

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"}

_ORIENTATION = 0x0112

_TURNED = (5, 6, 7, 8)  # orientations that swap width and height

_DEEP_MODES = ("I", "F")  # of 16 and 32 bits a pixel, "I;16" too


def image_size(path: Path, decode: bool = False) -> tuple[int, int]:
    """(width, height) after the EXIF turn that Detectron2 makes; `decode` reads every pixel."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL warns of odd EXIF blocks that do no harm
            with Image.open(path) as image:
                width, height = image.size
                # Asked of `info` first: getexif() would decode a whole PNG to find none.
                exif = image.getexif() if "exif" in image.info else {}
                if image.mode.split(";")[0] in _DEEP_MODES:
                    bits = "more than 8 bits a pixel, which turn white when read as RGB"
                    raise KsclError(f"has {bits} (mode {image.mode})")
                if decode:
                    image.load()
    except KsclError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever a broken file leads them to
        raise KsclError(f"cannot be decoded: {error or type(error).__name__}") from error
    return (height, width) if exif.get(_ORIENTATION) in _TURNED else (width, height)
