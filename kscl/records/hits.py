"""Which test images an evaluation got right, as text for its record, so that two can be paired."""

from __future__ import annotations

import base64

import numpy as np


def to_text(right: np.ndarray) -> str:
    """Pack (n,) true and false, one bit each, into text."""
    return base64.b64encode(np.packbits(right.astype(bool)).tobytes()).decode("ascii")


def from_text(text: str, count: int) -> np.ndarray | None:
    """Return what `to_text` was given, or None if the text is not that of `count` images."""
    try:
        packed = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    except ValueError:
        return None
    if len(packed) != -(-count // 8):
        return None
    return np.unpackbits(packed, count=count).astype(bool)
