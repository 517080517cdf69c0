"""Image formats: which files are images, what their headers say, and how each is decoded.

A format is one function under `@image_format(...)`; any module that is imported can add one. Pillow
recognizes a file by its content and reads the header, which decides whether the file is decoded at
all; a format that Pillow lacks needs a plugin of Pillow's (`Image.register_open`) beside its
function. Most formats are decoded by OpenCV, the fastest, which gets gray, palette, 16-bit, CMYK
and EXIF-rotated files right. What it refuses is given to Pillow, which reads a few kinds more and
can say what is wrong. Transparency is dropped, as in torchvision's loaders.
"""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from kscl.registry import Registry

# The limit of Pillow and of torchvision's loader: half a gigabyte of pixels.
MAX_PIXELS = 178_956_970
DECODED_SAMPLE = 2000  # images per set that a check decodes by default

# Pillow warns of odd EXIF blocks that do no harm, and at half of its limit on pixels.
warnings.filterwarnings("ignore", module=r"PIL\.")


# Advice for a file that cannot be used.
CONVERT = "Convert it to 8-bit RGB"
SAVE_AS = "Copy or download it again, or save it as JPEG or PNG"
SCALE_DOWN = "Scale it down"


class UnreadableImage(Exception):
    """The bytes are not a whole image; the message is the reason, `fix` what helps."""

    def __init__(self, reason: str, fix: str = "Copy or download it again") -> None:
        super().__init__(reason)
        self.fix = fix


class Decoded(NamedTuple):
    """A picture, and its original size, which is larger if it was decoded at reduced size."""

    picture: np.ndarray  # (h, w, 3), uint8, RGB, upright
    height: int
    width: int


# Returns 1, 2, 4 or 8 from the upright height and width: by how much a picture may be reduced.
Reduction = Callable[[int, int], int]
Decoder = Callable[[bytes, Image.Image, Reduction | None], Decoded]


class ImageFormat(NamedTuple):
    """A registered format."""

    decode: Decoder  # from the file's bytes and its header, opened by Pillow
    signatures: tuple[bytes, ...]  # with which a file starts that Pillow may not recognize
    unread: str  # what such a file may be, besides damaged


# By Pillow's names. Every Image.open of the project is held to these: Pillow would otherwise go by
# the content and start Ghostscript for an EPS file that is named .jpg.
FORMATS: Registry[ImageFormat] = Registry("image format")
IMAGE_EXTENSIONS: list[str] = []


def image_format(
    name: str, *extensions: str, signatures: tuple[bytes, ...] = (), unread: str = ""
) -> Callable[[Decoder], Decoder]:
    """Register a function that decodes the format which Pillow calls `name`.

    Files of its extensions, in lower case with a dot, are images wherever folders are listed.
    """

    def register(decode: Decoder) -> Decoder:
        FORMATS.register(name, ImageFormat(decode, signatures, unread))
        IMAGE_EXTENSIONS.extend(extensions)
        return decode

    return register


def is_image(name: str) -> bool:
    """Return whether a file is named like an image."""
    return name.lower().endswith(tuple(IMAGE_EXTENSIONS))


@contextlib.contextmanager
def open_image(file: IO[bytes], max_pixels: int = MAX_PIXELS) -> Iterator[Image.Image]:
    """Read the header of an image; raise UnreadableImage if it must not or cannot be decoded."""
    try:
        with Image.open(file, formats=list(FORMATS)) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise UnreadableImage(_too_large(f"{width} x {height}", max_pixels), SCALE_DOWN)
            yield image
    except UnreadableImage:
        raise
    except Image.DecompressionBombError as error:
        raise UnreadableImage(_too_large("too many", MAX_PIXELS), SCALE_DOWN) from error
    except Image.UnidentifiedImageError as error:
        raise UnreadableImage(_unknown_kind(file), SAVE_AS) from error
    except Exception as error:  # Pillow's decoders raise whatever a broken file leads them to
        reason = str(error) or type(error).__name__
        raise UnreadableImage(f"it is truncated or damaged ({reason})") from error


def _too_large(size: str, max_pixels: int) -> str:
    return f"it has {size} pixels, more than the {max_pixels} that DATA.MAX_PIXELS allows"


def _unknown_kind(file: IO[bytes]) -> str:
    file.seek(0)
    start = file.read(64)
    for name, known in FORMATS.items():
        if start.startswith(known.signatures):
            return f"it is a damaged {name}, or {known.unread}"
    kinds = ", ".join(sorted(FORMATS))
    return f"it is not an image of a known kind ({kinds}), or its header is damaged"


def decode_whole(data: bytes, image: Image.Image, reduction: Reduction | None = None) -> Decoded:
    """Decode at full size."""
    if image.mode == "F":
        raise UnreadableImage(_unknown_white("floating-point numbers"), CONVERT)
    picture = _decode_by_opencv(data, "IMREAD_COLOR_RGB")
    if picture is None:
        picture = _decode_by_pillow(image)
    return Decoded(picture, *picture.shape[:2])


@image_format("JPEG", ".jpg", ".jpeg", ".jpe")
def decode_jpeg(data: bytes, image: Image.Image, reduction: Reduction | None = None) -> Decoded:
    """Decode at reduced size if asked: libjpeg then takes a fraction of the time.

    Pillow's draft mode gives the same pixels, no faster.
    """
    if reduction is not None:
        width, height = image.size
        if image.getexif().get(0x0112, 1) >= 5:  # the EXIF orientation swaps width and height
            width, height = height, width
        by = reduction(height, width)
        if by > 1:
            small = _decode_by_opencv(data, f"IMREAD_REDUCED_COLOR_{by}")
            if small is not None and small.shape[:2] == (-(-height // by), -(-width // by)):
                _opencv().cvtColor(small, _opencv().COLOR_BGR2RGB, dst=small)
                return Decoded(small, height, width)
    return decode_whole(data, image)


@image_format(
    "TIFF",
    ".tif",
    ".tiff",
    signatures=(b"II*\0", b"MM\0*"),
    unread="one whose pixels are not 8- or 16-bit integers (floating-point colors have no known "
    "range)",
)
def decode_tiff(data: bytes, image: Image.Image, reduction: Reduction | None = None) -> Decoded:
    """Decode at full size."""
    if image.mode == "I":
        raise UnreadableImage(_unknown_white("32-bit integers"), CONVERT)
    return decode_whole(data, image)


for _name, *_extensions in (
    ("BMP", ".bmp"),
    ("GIF",),  # only under another format's name
    ("PNG", ".png"),
    ("PPM", ".ppm", ".pgm"),
    ("WEBP", ".webp"),
):
    image_format(_name, *_extensions)(decode_whole)


def _unknown_white(pixels: str) -> str:
    # Such pixels would turn black or white.
    return (
        f"its pixels are {pixels}, which have no known range; save it with 8 or 16 bits per channel"
    )


@functools.cache
def _opencv() -> Any:
    """Import OpenCV on first use: a listing of files does without."""
    import cv2

    # We report a broken file by its name, which OpenCV's warning does not know.
    set_level = getattr(cv2, "setLogLevel", None) or cv2.utils.logging.setLogLevel  # OpenCV 4, 5
    set_level(1)  # fatal errors
    return cv2


def _decode_by_opencv(data: bytes, flags: str) -> np.ndarray | None:
    cv2 = _opencv()
    try:
        return cv2.imdecode(np.frombuffer(data, np.uint8), getattr(cv2, flags))
    except cv2.error:
        return None


def _decode_by_pillow(image: Image.Image) -> np.ndarray:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        # Pillow's own conversion cuts 16-bit values off at 255 instead of scaling them.
        gray = (np.asarray(image).astype(np.float64) * (255 / 65535)).round().clip(0, 255)
        return np.repeat(gray.astype(np.uint8)[..., None], 3, axis=2)
    return np.array(image.convert("RGB"))


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
        # Pillow opens a JPEG with a second picture behind it as MPO, which is not registered.
        name = image.format or ""
        known = FORMATS[name].decode if name in FORMATS else decode_whole
        return known(data, image, reduction)
