"""Split a set in two, each class in proportion, without tearing a group apart.

This is iterative stratification (Sechidis et al., 2011) over groups instead of images: the class
with the fewest groups left is dealt out first, each group to the side that lacks most of the class.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Sequence

from kscl.errors import KsclError

NOTHING = ""  # the class of an image without objects
Side = int  # 0 or 1


def parse_split(text: str) -> tuple[float, float]:
    """Return the two fractions of `75/25`."""
    try:
        parts = [float(part) for part in text.split("/")]
        if len(parts) != 2 or min(parts) <= 0 or abs(sum(parts) - 100) > 1e-6:
            raise ValueError
    except ValueError:
        raise KsclError(
            f"--split {text} is not two positive percentages that add up to 100. Write 75/25 for "
            "three quarters to train on and one quarter to test on."
        ) from None
    return parts[0] / 100, parts[1] / 100


def deal_groups(
    groups: Sequence[Sequence[Sequence[Hashable]]], fractions: tuple[float, float], seed: int
) -> list[Side]:
    """Return the side of every group; a group is a list of images, an image a list of classes."""
    contents = [
        Counter(name for image in group for name in (set(image) or {NOTHING})) for group in groups
    ]
    total: Counter[Hashable] = sum(contents, Counter())
    wanted = [{name: part * count for name, count in total.items()} for part in fractions]
    room = [part * sum(map(len, groups)) for part in fractions]
    has: list[Counter[Hashable]] = [Counter(), Counter()]
    sides: dict[int, Side] = {}
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
