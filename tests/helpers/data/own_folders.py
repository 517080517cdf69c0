"""The drawn scenes as a newcomer has them: a folder of images and a flat folder of labels."""

from __future__ import annotations

import shutil
from pathlib import Path

from kscl.commands import make_shapes
from kscl.data.annotated.voc import read_voc


def shapes_folders(folder: Path, labels: str) -> tuple[Path, Path]:
    """Return (images, labels) with labels in XML files or as a YOLO copy."""
    drawn = folder / "drawn"
    few = ["--unlabeled", "5", "--train", "10", "--val", "5"]  # only the scenes are used
    assert make_shapes.main(["--output-dir", str(drawn), "--num-classes", "5", *few]) == 0
    voc = drawn / "VOCdevkit/VOC2007"
    images, target = folder / "images", folder / "labels"
    shutil.copytree(voc / "JPEGImages", images)
    if labels == "xml":
        shutil.copytree(voc / "Annotations", target)
        return images, target
    target.mkdir()
    for split in ("trainval", "test"):
        found = read_voc(voc, split).checked()
        (target / "classes.txt").write_text("\n".join(found.class_names))
        for image in found.images:
            lines = []
            for thing in image.objects:
                x1, y1, x2, y2 = thing.box
                center = f"{(x1 + x2) / 2 / image.width:.6f} {(y1 + y2) / 2 / image.height:.6f}"
                size = f"{(x2 - x1) / image.width:.6f} {(y2 - y1) / image.height:.6f}"
                lines.append(f"{found.class_names.index(thing.name)} {center} {size}")
            (target / f"{image.id}.txt").write_text("\n".join(lines))
    return images, target
