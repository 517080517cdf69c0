"""Image files: their size as Detectron2 sees it, whether they decode, which are equal."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

from PIL import Image

from detection.errors import DetectionError
from kscl.files import sha256_of

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"}
TAIL_BYTES = 4096

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
                    raise DetectionError(f"has {bits} (mode {image.mode})")
                if decode:
                    image.load()
    except DetectionError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever a broken file leads them to
        raise DetectionError(f"cannot be decoded: {error or type(error).__name__}") from error
    return (height, width) if exif.get(_ORIENTATION) in _TURNED else (width, height)


def equal_files(left: Iterable[Path], right: Iterable[Path]) -> list[tuple[Path, Path]]:
    """Each file on the right that has the content of one on the left, after that one.

    Size, then the last bytes, then a hash of all: of few files more than the end is ever read.
    """
    groups = [(list(left), list(right))]
    for key in (os.path.getsize, _tail, sha256_of):
        groups = [finer for group in groups for finer in _split_by(key, *group)]
    return [(lefts[0], path) for lefts, rights in groups for path in rights]


def _split_by(
    key: Callable[[Path], object], left: list[Path], right: list[Path]
) -> list[tuple[list[Path], list[Path]]]:
    found: dict[object, tuple[list[Path], list[Path]]] = {}
    for side, paths in enumerate((left, right)):
        for path in paths:
            found.setdefault(key(path), ([], []))[side].append(path)
    return [group for group in found.values() if group[0] and group[1]]


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, os.path.getsize(path) - TAIL_BYTES))
        return hashlib.md5(file.read()).digest()
