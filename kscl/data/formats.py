"""Which image files are read, and what their headers say before a pixel is decoded."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from PIL import Image

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

# Every Image.open of the project is held to this list: Pillow would otherwise go by the content
# and start Ghostscript for an EPS file that is named .jpg.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

# Where Pillow, and with it torchvision's loader, stops; the pixels take half a gigabyte.
MAX_PIXELS = 178_956_970
DECODED_SAMPLE = 2000  # images per set that a check decodes unless all are asked for

TIFF_SIGNATURES = (b"II*\0", b"MM\0*")

# Pillow warns of odd EXIF blocks that do no harm, and at half of its limit on pixels.
warnings.filterwarnings("ignore", module=r"PIL\.")


class UnreadableImage(Exception):
    """The bytes are not a whole image; the message is the reason."""


def is_image(name: str) -> bool:
    """Return whether a file is named like an image."""
    return name.lower().endswith(IMAGE_EXTENSIONS)


@contextlib.contextmanager
def open_image(file: Path | IO[bytes], max_pixels: int = MAX_PIXELS) -> Iterator[Image.Image]:
    """Read the header of an image; raise UnreadableImage if it must not or cannot be decoded."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise UnreadableImage(_too_large(f"{width} x {height}", max_pixels))
            yield image
    except UnreadableImage:
        raise
    except Image.DecompressionBombError as error:
        raise UnreadableImage(_too_large("too many", MAX_PIXELS)) from error
    except Image.UnidentifiedImageError as error:
        raise UnreadableImage(_unknown_kind(file)) from error
    except Exception as error:  # Pillow's decoders raise whatever a broken file leads them to
        raise UnreadableImage(str(error) or type(error).__name__) from error


def check_depth(image: Image.Image) -> None:
    """Raise UnreadableImage if white has no known value: such pixels would turn black or white."""
    if image.mode == "F":
        raise UnreadableImage(
            "its pixels are floating-point numbers, whose range no header tells; "
            "save it with 8 or 16 bits per channel"
        )
    if image.mode == "I" and image.format == "TIFF":
        raise UnreadableImage(
            "its pixels are 32-bit integers, whose range no header tells; "
            "save it with 8 or 16 bits per channel"
        )


def _too_large(size: str, max_pixels: int) -> str:
    return f"it has {size} pixels, more than the {max_pixels} that DATA.MAX_PIXELS allows"


def _unknown_kind(file: Path | IO[bytes]) -> str:
    if not isinstance(file, Path):
        file.seek(0)
        if file.read(4) in TIFF_SIGNATURES:
            return (
                "it is a damaged TIFF, or one whose pixels are not 8- or 16-bit integers "
                "(floating-point colors have no known range)"
            )
    return f"it is not an image of a known kind ({', '.join(FORMATS)}), or its header is damaged"
