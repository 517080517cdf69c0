"""Folders of images and labels as newcomers bring them, and the command that prepares them."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from kscl.commands import make_shapes, prepare_data
from kscl.data.annotated.voc import read_voc
from tests.helpers.data.photos import jpeg, photo
from tests.helpers.data.sets import annotation_xml

SIZE = (100, 75)  # width, height
BOXES = {"cat": (10, 20, 50, 60), "dog": (30, 5, 90, 70)}  # from 0, the last pixel excluded
Names = dict[str, list[str]]  # the classes in each photo


@functools.cache
def photo_file(seed: int, quality: int = 90) -> bytes:
    return jpeg(photo(seed, *SIZE[::-1]), quality)


def write_photos(folder: Path, count: int, nested: bool = False) -> Names:
    """Different photos by name, every third with a dog only, the others with a cat or both."""
    names = {}
    for number in range(count):
        name = f"part{number % 2}/p{number}" if nested else f"p{number}"
        path = folder / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo_file(number))
        names[name] = [["dog"], ["cat"], ["cat", "dog"]][number % 3]
    return names


def write_xml(folder: Path, names: Names, flat: bool = True) -> None:
    for name, classes in names.items():
        path = folder / f"{Path(name).name if flat else name}.xml"
        path.parent.mkdir(parents=True, exist_ok=True)
        boxes = [(c, (BOXES[c][0] + 1, BOXES[c][1] + 1, *BOXES[c][2:]), 0) for c in classes]
        path.write_text(annotation_xml(boxes, SIZE))


def yolo_line(label: int, box: Sequence[float], size: tuple[int, int]) -> str:
    x1, y1, x2, y2 = (value / size[place % 2] for place, value in enumerate(box))
    return f"{label} {(x1 + x2) / 2:.6f} {(y1 + y2) / 2:.6f} {x2 - x1:.6f} {y2 - y1:.6f}"


def write_yolo(folder: Path, names: Names) -> None:
    folder.mkdir(parents=True)
    (folder / "classes.txt").write_text("dog\ncat\n")
    for name, classes in names.items():
        lines = [yolo_line(["dog", "cat"].index(c), BOXES[c], SIZE) for c in classes]
        (folder / f"{Path(name).name}.txt").write_text("\n".join(lines))


def write_coco(
    folder: Path, names: Names, file_name: Callable[[str], str] = "photos/{}.jpg".format
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    images = [
        {"id": i, "file_name": file_name(name), "width": SIZE[0], "height": SIZE[1]}
        for i, name in enumerate(names)
    ]
    objects = [(i, c) for i, classes in enumerate(names.values()) for c in classes]
    annotations = [
        {
            "id": number,
            "image_id": i,
            "category_id": 5 if c == "dog" else 9,
            "bbox": [*BOXES[c][:2], BOXES[c][2] - BOXES[c][0], BOXES[c][3] - BOXES[c][1]],
        }
        for number, (i, c) in enumerate(objects)
    ]
    categories = [{"id": 5, "name": "dog"}, {"id": 9, "name": "cat"}]
    content = {"images": images, "categories": categories, "annotations": annotations}
    (folder / "all.json").write_text(json.dumps(content))


def write_scenes(root: Path, count: int, side: int) -> None:
    """Different photos of 320 x 240 pixels, each with an object of this side."""
    for folder in ("photos", "labels"):
        (root / folder).mkdir(parents=True)
    for number in range(count):
        (root / f"photos/p{number}.jpg").write_bytes(jpeg(photo(number, 240, 320)))
        box = ("cat", (11, 21, 10 + side, 20 + side), 0)
        (root / f"labels/p{number}.xml").write_text(annotation_xml([box], (320, 240)))


def write_folders(root: Path, counts: dict[str, int]) -> list[str]:
    """Write photos by class; return the command that prepares them."""
    start = 0
    for name, count in counts.items():
        (root / "photos" / name).mkdir(parents=True)
        for number in range(count):
            (root / f"photos/{name}/{number}.jpg").write_bytes(photo_file(start + number))
        start += count
    return ["own", "--images", str(root / "photos"), "--output-dir", str(root / "mine")]


def prepare(root: Path, *more: str) -> int:
    where = ("--images", root / "photos", "--annotations", root / "labels")
    return prepare_data.main(["own", *map(str, where), "--output-dir", str(root / "mine"), *more])


def split_ids(root: Path, split: str) -> list[str]:
    return (root / "mine/ImageSets/Main" / f"{split}.txt").read_text().split()


def shapes_folders(folder: Path, labels: str) -> tuple[Path, Path]:
    """Return (images, labels) of the drawn scenes, with labels in XML files or as a YOLO copy."""
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
            size = image.width, image.height
            names = found.class_names
            lines = [yolo_line(names.index(o.name), o.box, size) for o in image.objects]
            (target / f"{image.id}.txt").write_text("\n".join(lines))
    return images, target
