"""Check that a folder has ImageNet's layout."""

from __future__ import annotations

import os
from pathlib import Path

from kscl.data.formats import is_image
from kscl.errors import KsclError

IMAGENET_CLASSES = 1000


def check_imagenet(root: Path, num_classes: int) -> str:
    """Describe what is there, or raise one error that lists everything that is wrong."""
    problems, classes, counts = [], {}, {}
    for split in ("train", "val"):
        folder = root / split
        if not folder.is_dir():
            problems.append(f"{folder}: There is no such folder.")
            continue
        entries = list(os.scandir(folder))
        classes[split] = {entry.name for entry in entries if entry.is_dir()}
        loose = [entry.name for entry in entries if entry.is_file() and is_image(entry.name)]
        if loose:
            problems.append(
                f"{folder}: {len(loose)} images ({loose[0]} …) lie in it, not in a folder of their "
                "class. Sort them by the ground truth of the development kit."
            )
        if len(classes[split]) != num_classes:
            problems.append(f"{folder}: {len(classes[split])} class folders, not {num_classes}.")
        counts[split] = {
            name: sum(is_image(entry.name) for entry in os.scandir(folder / name))
            for name in sorted(classes[split])
        }
        empty = [name for name, count in counts[split].items() if not count]
        if empty:
            problems.append(
                f"{folder}: no image in {', '.join(empty[:3])} ({len(empty)} in total)."
            )
    if len(classes) == 2 and classes["train"] != classes["val"]:
        names = sorted(classes["train"] ^ classes["val"])
        problems.append(f"train and val differ in {len(names)} classes: {', '.join(names[:3])} …")
    if problems:
        raise KsclError(f"{root} does not have ImageNet's layout:\n  " + "\n  ".join(problems))
    counted = [f"{sum(count.values()):,} images in {split}" for split, count in counts.items()]
    return f"{root}: {num_classes} classes, {' and '.join(counted)}"
