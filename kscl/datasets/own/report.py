"""What a prepared set holds, for the person who brought it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tabulate import tabulate

from kscl.data.annotated.annotations import AnnotatedImage

SHOWN = 5  # of odd files and near-duplicates
FEW_OBJECTS = 10  # to train on or to test on: fewer say little


def class_table(
    images: Mapping[str, AnnotatedImage], splits: Mapping[str, Sequence[str]], names: Sequence[str]
) -> str:
    """Return one row per class: images, and objects of each split."""
    rows = []
    for name in names:
        with_it = [i for i in images.values() if any(o.name == name for o in i.objects)]
        counts = [
            sum(o.name == name for i in splits[split] for o in images[i].objects)
            for split in ("trainval", "test")
        ]
        rows.append([name, len(with_it), sum(counts), *counts])
    return tabulate(rows, ["class", "images", "objects", "to train on", "to test on"])


def box_sizes(images: Sequence[AnnotatedImage]) -> str:
    """Return the middle and the spread of the boxes' sizes, absolute and relative."""
    boxes = np.array([thing.box for image in images for thing in image.objects])
    sides = np.sqrt((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]))
    shown = np.sqrt([i.width * i.height for i in images for _ in i.objects])
    low, middle, high = np.quantile(sides, [0.1, 0.5, 0.9])
    part = np.quantile(sides / shown, [0.1, 0.5, 0.9])
    return (
        f"Boxes: {len(boxes):,}; side (root of the area) {middle:.0f} pixels, 80 % within "
        f"{low:.0f} to {high:.0f}; relative to the image {part[1]:.0%}, {part[0]:.0%} to "
        f"{part[2]:.0%}."
    )


def few(
    images: Mapping[str, AnnotatedImage], splits: Mapping[str, Sequence[str]], names: Sequence[str]
) -> list[str]:
    """Return one line per split with the classes of which it has too few objects, or none."""
    lines = []
    for split, purpose in (("trainval", "to train on"), ("test", "to test on")):
        counts = Counter(o.name for i in splits[split] for o in images[i].objects)
        absent = [name for name in names if not counts[name]]
        rare = [f"{n} ({counts[n]})" for n in names if 0 < counts[n] < FEW_OBJECTS]
        if absent:
            lines.append(f"No object {purpose}: {', '.join(absent)}. Annotate more of them.")
        if rare:
            lines.append(f"Few objects {purpose}: {', '.join(rare)}. Their AP is mostly chance.")
    return lines


def listed(paths: Sequence[Path]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(path.name for path in paths[:SHOWN]) + more
