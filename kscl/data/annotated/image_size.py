"""The size of an image file as Detectron2 sees it, and whether it decodes."""

from __future__ import annotations

from pathlib import Path

from kscl.data.formats import UnreadableImage, open_image
from kscl.data.source import open_regular
from kscl.errors import KsclError

_ORIENTATION = 0x0112

_TURNED = (5, 6, 7, 8)  # orientations that swap width and height

_DEEP_MODES = ("I", "F")  # of 16 and 32 bits per pixel, "I;16" too


def image_size(path: Path, decode: bool = False) -> tuple[int, int]:
    """Return (width, height) after the EXIF turn that Detectron2 makes; `decode` reads all pixels.

    The message of the KsclError for a file that cannot be used is the reason alone.
    """
    try:
        with open_regular(path) as file, open_image(file) as image:
            width, height = image.size
            # Asked of `info` first: getexif() would decode a whole PNG to find none.
            exif = image.getexif() if "exif" in image.info else {}
            if image.mode.split(";")[0] in _DEEP_MODES:
                raise UnreadableImage(
                    "it has more than 8 bits per pixel, which turn white when read as RGB "
                    f"(mode {image.mode})"
                )
            if decode:
                image.load()
    except UnreadableImage as error:
        raise KsclError(f"cannot be used: {error}") from error
    except (OSError, ValueError) as error:
        raise KsclError(f"cannot be read: {getattr(error, 'strerror', '') or error}") from error
    return (height, width) if exif.get(_ORIENTATION) in _TURNED else (width, height)
