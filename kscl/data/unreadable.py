"""Decode a set, or a sample of a large one, to find what cannot be read before a run meets it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from kscl.data.annotated.annotations import Problem
from kscl.data.decode import decode
from kscl.data.formats import MAX_PIXELS, UnreadableImage
from kscl.data.source import ImageSource

THREADS = 8  # decoding waits for the disk, and other threads may run meanwhile

# Digests of files that could be decoded, with the pixels that were allowed. A suite checks many
# stages in one process, and most of them train on the same images.
_decodable: set[tuple[bytes, int]] = set()


class Findings(NamedTuple):
    """What decoding told."""

    num_decoded: int
    reasons: dict[int, str]  # of each image that cannot be read, by index
    notes: list[Problem]  # that only a sample was decoded


def find_unreadable(
    source: ImageSource, indices: Sequence[int], most: int, max_pixels: int = MAX_PIXELS
) -> Findings:
    """Decode these images of a source, or a fixed sample if there are more than `most`."""
    notes = []
    if len(indices) > most:
        what = f"a sample of {most:,} of the {len(indices):,} images was decoded"
        notes = [Problem("sample", source.where, what, "", fatal=False)]
        indices = random.Random(0).sample(indices, most)

    def reason(index: int) -> tuple[int, str]:
        return index, _reason(source, index, max_pixels)

    with ThreadPoolExecutor(THREADS) as threads:
        reasons = {index: why for index, why in threads.map(reason, indices) if why}
    return Findings(len(indices), reasons, notes)


def _reason(source: ImageSource, index: int, max_pixels: int) -> str:
    """Return why an image cannot be read, or nothing."""
    try:
        data = source.read(index)
        known = (hashlib.blake2b(data, digest_size=16).digest(), max_pixels)
        if known not in _decodable:
            decode(data, max_pixels)
            _decodable.add(known)
    except OSError as error:
        return error.strerror or str(error)
    except UnreadableImage as error:
        return str(error)
    return ""
