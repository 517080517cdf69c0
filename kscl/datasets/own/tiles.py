"""Cut photos into tiles to pretrain on, where objects are small.

Two random crops of a photo with many objects mostly show different ones, so that nothing tells a
network that they belong together. Two crops of a tile that is two objects wide mostly share one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np

from kscl.data.annotations import AnnotatedImage
from kscl.data.formats import UnreadableImage, decode_image
from kscl.data.source import read_file

TILES = "tiles"
OBJECTS_WIDE = 2.0  # side of a tile, in sides of an object of median size
LARGE = 0.4  # side of such an object, relative to the short side: from here on photos stay whole
LEAST_SIDE, STORED_SIDE = 48, 96  # pixels: of a tile, and of its file at most
LEFT_OVER = 0.2  # of a tile's side: what is beyond the last tile is left out, to save a row of them
MOST_TILES = 5000  # of all photos together, but at least one of each


def object_side(images: Sequence[AnnotatedImage]) -> float:
    """Return the median side of an object, relative to the short side of its image; 1 without."""
    sides = [
        np.sqrt((x2 - x1) * (y2 - y1)) / min(image.width, image.height)
        for image in images
        for x1, y1, x2, y2 in (thing.box for thing in image.objects)
    ]
    return float(np.median(sides)) if sides else 1.0


def write_tiles(folder: Path, photos: Mapping[str, Path], side: float) -> int:
    """Write the tiles of photos by id into a new folder; return their number.

    `side` is that of an object, relative to the short side. None are written if objects are large.
    A photo that cannot be read has none.
    """
    if side >= LARGE:
        return 0
    folder.mkdir()
    most = max(1, MOST_TILES // len(photos))
    written = 0
    for name, path in photos.items():
        try:
            picture = decode_image(read_file(path))
        except (OSError, UnreadableImage):
            continue
        tiles = list(cut(picture, OBJECTS_WIDE * side))
        chosen = sorted(random.Random(name).sample(range(len(tiles)), min(most, len(tiles))))
        for number in chosen:
            file = folder / f"{name}-{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            _, data = cv2.imencode(".jpg", tiles[number][..., ::-1], (cv2.IMWRITE_JPEG_QUALITY, 95))
            file.write_bytes(data.tobytes())
        written += len(chosen)
    return written


def cut(picture: np.ndarray, side: float) -> Iterator[np.ndarray]:
    """Yield the tiles of a picture (h, w, 3), row by row; `side` is relative to the short side."""
    height, width = picture.shape[:2]
    pixels = min(height, width, max(LEAST_SIDE, round(side * min(height, width))))
    for top in _starts(height, pixels):
        for left in _starts(width, pixels):
            tile = picture[top : top + pixels, left : left + pixels]
            if pixels > STORED_SIDE:
                tile = cv2.resize(tile, (STORED_SIDE, STORED_SIDE), interpolation=cv2.INTER_AREA)
            yield tile


def _starts(length: int, pixels: int) -> list[int]:
    """Return where tiles begin that lie evenly from one end to the other, or one in the middle."""
    number = math.ceil(length / pixels - LEFT_OVER)
    if number <= 1:
        return [(length - pixels) // 2]
    return [round(x) for x in np.linspace(0, length - pixels, number)]
