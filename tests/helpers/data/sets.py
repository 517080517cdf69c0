"""Small data sets on disk, good or with one thing wrong, and random detections on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kscl.data.annotations import AnnotatedSet, Problem

Thing = tuple[str, tuple[float, float, float, float], int]  # class, VOC box (from 1), difficult

SIZE = (64, 48)  # width, height


class StableNumpy:
    """numpy for Detectron2's VOC evaluator, changed in one thing: equal scores keep their order.

    numpy's default sort orders ties as the instructions of the CPU have it, and so do its numbers.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def argsort(self, values: np.ndarray) -> np.ndarray:
        return np.argsort(values, kind="stable")


def thing_xml(thing: Thing) -> str:
    name, box, difficult = thing
    corners = zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    box_xml = "".join(f"<{tag}>{value:g}</{tag}>" for tag, value in corners)
    return (
        f"<object><name>{name}</name><pose>Left</pose><truncated>0</truncated>"
        f"<difficult>{difficult}</difficult><bndbox>{box_xml}</bndbox></object>"
    )


def annotation_xml(things: Sequence[Thing], size: tuple[int, int] = SIZE) -> str:
    return (
        f"<annotation><size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
        f"{''.join(map(thing_xml, things))}</annotation>"
    )


def write_image(path: Path, seed: int, size: tuple[int, int] = SIZE) -> None:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_voc(
    root: Path,
    splits: Mapping[str, Sequence[str]],
    things: Mapping[str, Sequence[Thing]],
    suffix: str = ".jpg",
    images: bool = True,
    size: tuple[int, int] = SIZE,
) -> Path:
    """A VOC folder; every image of `things` has a picture of its own and an annotation."""
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name, ids in splits.items():
        (root / "ImageSets" / "Main" / f"{name}.txt").write_text("".join(f"{i}\n" for i in ids))
    for number, (image_id, found) in enumerate(things.items()):
        (root / "Annotations" / f"{image_id}.xml").write_text(annotation_xml(found, size))
        if images:
            write_image(root / "JPEGImages" / f"{image_id}{suffix}", number, size)
    return root


def small_voc(root: Path, **options: Any) -> Path:
    """Two training and two test images with cats and dogs; nothing is wrong with it."""
    box, other = (1, 1, 20, 20), (30, 10, 60, 40)
    things = {
        "a": [("cat", box, 0), ("dog", other, 0)],
        "b": [("dog", box, 1), ("cat", other, 0)],
        "c": [("cat", box, 0), ("dog", other, 0)],
        "d": [("dog", (5, 5, 64, 48), 0)],
    }
    return write_voc(root, {"train": ["a", "b"], "test": ["c", "d"]}, things, **options)


def small_coco(root: Path, **changes: Any) -> tuple[Path, Path]:
    """(annotations, images): two pictures with boxes of categories whose ids have gaps."""
    images = []
    for number, name in enumerate(("one.jpg", "two.png")):
        write_image(root / "images" / name, number)
        images.append({"id": 7 + number, "file_name": name, "width": SIZE[0], "height": SIZE[1]})
    content = {
        "images": images,
        "categories": [{"id": 18, "name": "dog"}, {"id": 3, "name": "cat"}],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 18, "bbox": [0, 0, 20, 20], "area": 90.0},
            {"id": 2, "image_id": 7, "category_id": 3, "bbox": [30, 9.5, 30, 30], "area": 900.0},
            {"id": 3, "image_id": 8, "category_id": 3, "bbox": [1, 1, 9, 9], "iscrowd": 1},
        ],
    } | changes
    (root / "annotations.json").write_text(json.dumps(content))
    return root / "annotations.json", root / "images"


def random_things(
    rng: np.random.Generator, images: int, classes: int, extent: int = 300
) -> dict[str, list[Thing]]:
    """Objects of every class, some difficult, some on top of each other."""
    things: dict[str, list[Thing]] = {}
    for number in range(images):
        found: list[Thing] = []
        for _ in range(rng.poisson(3)):
            x, y = (int(value) for value in rng.integers(1, extent // 2, 2))
            width, height = (int(value) for value in rng.integers(0, extent // 2, 2))
            name = f"class{rng.integers(classes)}"
            found.append((name, (x, y, x + width, y + height), int(rng.random() < 0.2)))
        things[f"{number:06d}"] = found
    first = things["000000"]
    first += [(f"class{index}", (10, 10, 90 + index, 80), 0) for index in range(classes)]
    return things


def random_detections(
    rng: np.random.Generator,
    things: Mapping[str, Sequence[Thing]],
    classes: int,
    most: int = 30,
    fewest: int = 0,
    decimals: int = 8,
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Boxes near objects, exact copies of them, and boxes anywhere; few decimals give ties."""
    found = {}
    for image_id, objects in things.items():
        count = int(rng.integers(fewest, most + 1))
        corner = rng.uniform(0, 200, (count, 2))
        boxes = np.concatenate([corner, corner + rng.uniform(1, 150, (count, 2))], axis=1)
        category = rng.integers(0, classes, count)
        for row in range(count):
            if objects and rng.random() < 0.7:
                name, box, _ = objects[rng.integers(len(objects))]
                exact = np.array(box, float) - (1, 1, 0, 0)
                boxes[row] = exact + rng.choice([0, 1, 5, 15]) * rng.normal(size=4)
                boxes[row, 2:] = np.maximum(boxes[row, 2:], boxes[row, :2] + 0.5)
                if rng.random() < 0.9:
                    category[row] = int(name.removeprefix("class"))
        scores = rng.random(count).round(decimals)
        found[image_id] = (boxes.astype(np.float32), scores.astype(np.float32), category)
    return found


def only_problem(found: AnnotatedSet) -> Problem:
    """Return the one problem of a set that stops a run."""
    fatal = [problem for problem in found.problems if problem.fatal]
    assert len(fatal) == 1, found.problems
    return fatal[0]
