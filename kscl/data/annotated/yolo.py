"""Labels in YOLO's text files: one per image, one object per line, in fractions of the image.

A line is `class x_center y_center width height`, or `class x1 y1 x2 y2 x3 y3 …` for the corners of
a polygon, whose bounding box is used. The class names are in a file nearby: classes.txt, obj.names,
or the `names` of data.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import yaml

from kscl.data.annotations import (
    UNREADABLE,
    AnnotatedObject,
    AnnotatedSet,
    AnnotationFormat,
    Box,
    Files,
    Refusal,
    annotation_format,
    check_class_names,
    image_size,
    unreadable_image,
)
from kscl.data.formats import UnreadableImage
from kscl.data.source import read_lines, read_text
from kscl.errors import KsclError

NAME_FILES = ("classes.txt", "obj.names", "predefined_classes.txt")
YAML_FILES = ("data.yaml", "data.yml", "dataset.yaml")
ROUNDING = 1e-3  # fractions are written with few digits: this far beyond an edge is on it


@annotation_format
class Yolo(AnnotationFormat):
    """One text file per image."""

    name = "yolo"
    files = "YOLO's .txt files"
    suffix = ".txt"
    companions = (*NAME_FILES, *YAML_FILES)

    def refusal(self, path: Path, image_names: set[str]) -> Refusal | None:
        """Accept a file that is empty or begins with an object."""
        try:
            words = (read_lines(path) or ["0 0 0 0 0"])[0].split()
        except KsclError:
            words = []
        if len(words) >= 5 and all(_is_number(word) for word in words):
            return None
        reason = "does not begin with a class number and coordinates"
        return Refusal(reason, damaged=path.stem in image_names)

    def read(self, files: Files) -> AnnotatedSet:
        """Read the labels, with the names of the classes from a file nearby if none are given."""
        found = AnnotatedSet(self.name, files.classes or _listed_classes(files))
        for name, path in files.annotations.items():
            image = files.image_of(name, found)
            if image is None:
                continue
            try:
                size, lines = image_size(image), read_text(path).splitlines()
            except UnreadableImage as error:
                found.problems.append(unreadable_image(image, error))
            except KsclError as error:
                found.note(UNREADABLE, path, error, "Write the labels again")
            else:
                found.add_image(image, size, _objects(lines, size, path, found), path)
        return found


def _listed_classes(files: Files) -> tuple[str, ...]:
    root, images = files.annotation_root, files.image_root
    folder = root if root.is_dir() else root.parent
    around = (folder, folder.parent, images, images.parent)
    paths = (near / name for near in around for name in (*NAME_FILES, *YAML_FILES))
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        raise KsclError(
            f"{folder} has YOLO labels, whose classes are numbers, but neither it nor the folders "
            "around it have a classes.txt, obj.names or data.yaml with their names. Write one, or "
            "give the names in order to kscl prepare with --classes NAME NAME …"
        )
    try:
        names = _yaml_names(path) if path.name in YAML_FILES else read_lines(path)
    except KsclError as error:
        raise KsclError(f"{path} {error}. Correct the file.") from error
    return check_class_names(names, path)


def _yaml_names(path: Path) -> Sequence[str]:
    try:
        content = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise KsclError(f"is not YAML: {error}") from error
    names = content.get("names") if isinstance(content, dict) else None
    if isinstance(names, dict) and set(names) == set(range(len(names))):
        names = [names[number] for number in range(len(names))]
    if not isinstance(names, list):
        raise KsclError("has no list 'names', numbered from 0")
    return names


def _objects(
    lines: Sequence[str], size: tuple[int, int], path: Path, found: AnnotatedSet
) -> Iterator[tuple[AnnotatedObject, str]]:
    """Yield the objects in pixels, and note the lines that are not objects."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            label, box = _parse(line, *size)
            if label >= len(found.class_names):
                last = len(found.class_names) - 1
                raise ValueError(f"is of class {label}, but the list ends at {last}")
        except ValueError as error:
            found.note(
                "bad label", path, f"line {number} {error}", "Correct the line, or delete it"
            )
            continue
        name = found.class_names[label]
        yield AnnotatedObject(name, box), f"line {number} ('{name}')"


def _parse(line: str, width: int, height: int) -> tuple[int, Box]:
    words = line.split()
    if not all(_is_number(word) for word in words) or not words[0].isdecimal():
        raise ValueError(f"is {line.strip()[:60]!r}, not a class number and coordinates")
    label, values = int(words[0]), [float(word) for word in words[1:]]
    if len(values) == 4:
        x, y, w, h = values
        corners: Iterable[float] = (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
    elif len(values) >= 6 and len(values) % 2 == 0:
        corners = (min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2]))
    else:
        raise ValueError(f"has {len(values)} numbers after the class, not 4 or a polygon's")
    if max(values) > 1 + ROUNDING or min(values) < -ROUNDING:
        raise ValueError("has a number outside 0 to 1: coordinates are fractions of the image")
    x1, y1, x2, y2 = (_snap(value) for value in corners)
    return label, (x1 * width, y1 * height, x2 * width, y2 * height)


def _snap(value: float) -> float:
    """Put a fraction that rounding took across an edge back onto it."""
    return min(max(value, 0.0), 1.0) if -ROUNDING <= value <= 1 + ROUNDING else value


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False
