"""One picture with the boxes that were found in it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from detection.errors import DetectionError

COLORS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#800000")


class Marked(Protocol):
    """What is drawn of an object."""

    @property
    def name(self) -> str:
        """The class."""
        ...

    @property
    def score(self) -> float:
        """The score, from 0 to 1."""
        ...

    @property
    def box(self) -> tuple[float, float, float, float]:
        """The corners in pixels."""
        ...


def draw_found(picture: np.ndarray, found: Iterable[Marked], output: Path) -> None:
    """Write the picture with a labeled box per object; a class has the same color everywhere."""
    image = Image.fromarray(picture)
    draw = ImageDraw.Draw(image)
    line = max(1, round(max(image.size) / 400))
    height = max(10, max(image.size) // 50)  # of the text
    font = ImageFont.load_default(size=height)
    for thing in found:
        color = COLORS[zlib.crc32(thing.name.encode()) % len(COLORS)]
        draw.rectangle(thing.box, outline=color, width=line)
        text = f"{thing.name} {thing.score:.2f}"
        corner = (thing.box[0], max(0.0, thing.box[1] - height - 2 * line))
        draw.rectangle(draw.textbbox(corner, text, font=font), fill=color)
        draw.text(corner, text, fill="white", font=font)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        image.save(output)
    except OSError as error:
        raise DetectionError(f"{output} cannot be written: {error}. Choose another.") from error
