"""Split a set in two: near-duplicates stay on one side, every class is on both in proportion."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from kscl.data.formats import UnreadableImage, decode_image
from kscl.data.source import read_file
from kscl.errors import KsclError

SIDE = 64  # pixels to which a picture is reduced before it is hashed
FREQUENCIES = 16  # of each direction
# Fraction of the bits in which near-duplicates may differ. On 364 photos of one microscope, saving
# again, halving or brightening a photo changes up to 3% of the bits and a shift by 5 pixels up to
# 13%; the nearest other photo differs in 35% or more, except one real pair (9%).
SAME = 0.2
THREADS = 8
ROWS = 1024  # compared at a time
NOTHING = ""  # the class of an image without objects


def find_groups(paths: Sequence[Path]) -> list[list[int]]:
    """Return groups of indices of nearly equal pictures; a picture without equal is its own."""
    with ThreadPoolExecutor(THREADS) as threads:
        hashes = list(threads.map(_hash_file, paths))
    readable = np.array([index for index, bits in enumerate(hashes) if bits is not None], int)
    pairs = readable[_close_pairs([bits for bits in hashes if bits is not None])]  # (n, 2)
    graph = coo_array((np.ones(len(pairs)), pairs.T), shape=(len(paths), len(paths)))
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(connected_components(graph, directed=False)[1]):
        groups.setdefault(group, []).append(index)
    return list(groups.values())


def picture_hash(picture: np.ndarray) -> np.ndarray:
    """Return the signs of the low frequencies of an RGB picture: 255 values of +1 or -1."""
    gray = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
    small = cv2.resize(gray, (SIDE, SIDE), interpolation=cv2.INTER_AREA).astype(np.float32)
    waves = cv2.dct(small)[:FREQUENCIES, :FREQUENCIES].ravel()[1:]  # without the mean
    return np.where(waves > np.median(waves), 1, -1).astype(np.float32)


def _hash_file(path: Path) -> np.ndarray | None:
    try:
        return picture_hash(decode_image(read_file(path)))
    except (OSError, UnreadableImage):  # reported where the images are checked
        return None


def _close_pairs(hashes: list[np.ndarray]) -> np.ndarray:
    """Return (n, 2), the pairs of hashes that differ in at most SAME of their values."""
    matrix = np.stack(hashes) if hashes else np.zeros((0, 1), np.float32)
    least = matrix.shape[1] * (1 - 2 * SAME)  # product of two rows: equal minus unequal values
    pairs = [np.zeros((0, 2), int)]
    for start in range(0, len(matrix), ROWS):
        close = matrix[start : start + ROWS] @ matrix.T >= least
        pairs.append(np.argwhere(close) + np.array((start, 0)))
    return np.concatenate(pairs)


def parse_split(text: str) -> tuple[float, float]:
    """Return the two fractions of `75/25`."""
    try:
        parts = [float(part) for part in text.split("/")]
        if len(parts) != 2 or min(parts) <= 0 or abs(sum(parts) - 100) > 1e-6:
            raise ValueError
    except ValueError:
        raise KsclError(
            f"--split must be two positive percentages that add up to 100, got {text}. Write 75/25 "
            "for three quarters to train on and one quarter to test on."
        ) from None
    return parts[0] / 100, parts[1] / 100


def deal_groups(
    groups: Sequence[Sequence[Sequence[Hashable]]], fractions: tuple[float, float], seed: int
) -> list[int]:
    """Return the side, 0 or 1, of every group: a list of images, each a list of classes.

    This is iterative stratification (Sechidis et al., 2011) over groups instead of images: the
    class with the fewest groups left is dealt out first, each group to the side that lacks most of
    the class.
    """
    contents = [
        Counter(name for image in group for name in (set(image) or {NOTHING})) for group in groups
    ]
    total: Counter[Hashable] = sum(contents, Counter())
    wanted = [{name: part * count for name, count in total.items()} for part in fractions]
    room = [part * sum(map(len, groups)) for part in fractions]
    has: list[Counter[Hashable]] = [Counter(), Counter()]
    sides: dict[int, int] = {}
    order = list(range(len(groups)))
    random.Random(seed).shuffle(order)
    order.sort(key=lambda index: -len(groups[index]))  # large groups are the hardest to place

    while len(sides) < len(groups):
        left = [index for index in order if index not in sides]
        counts = Counter(name for index in left for name in contents[index])
        rarest = min(counts, key=lambda name: (counts[name], str(name)))
        waiting = [index for index in left if rarest in contents[index]]
        for position, index in enumerate(waiting):
            without = [side for side in (0, 1) if not has[side][rarest]]
            must = without if len(waiting) - position <= len(without) else [0, 1]
            side = max(must, key=lambda s: (round(wanted[s][rarest], 9), round(room[s], 9), -s))
            sides[index] = side
            room[side] -= len(groups[index])
            for name, count in contents[index].items():
                wanted[side][name] -= count
                has[side][name] += count
    return [sides[index] for index in range(len(groups))]
