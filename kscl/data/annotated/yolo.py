"""Labels in YOLO's text files: one per image, one object per line, in fractions of the image.

A line is `class x_center y_center width height`, or `class x1 y1 x2 y2 x3 y3 …` for the corners of
a polygon, whose bounding box is used. The class names are in a file nearby: classes.txt, obj.names,
or the `names` of data.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from kscl.data.annotations import (
    AnnotatedImage,
    AnnotatedObject,
    AnnotatedSet,
    AnnotationFormat,
    Box,
    Files,
    Problem,
    UnusableImage,
    annotation_format,
    check_box,
    check_class_names,
    image_size,
    is_ordered,
)
from kscl.data.source import read_file
from kscl.errors import KsclError

NAME_FILES = ("classes.txt", "obj.names", "predefined_classes.txt")
YAML_FILES = ("data.yaml", "data.yml", "dataset.yaml")
ROUNDING = 1e-3  # fractions are written with few digits: so far beyond an edge is on it


@annotation_format
class Yolo(AnnotationFormat):
    """One text file per image."""

    name = "yolo"
    files = "YOLO's .txt files"
    suffix = ".txt"
    companions = (*NAME_FILES, *YAML_FILES)

    def refusal(self, path: Path) -> str:
        """Accept a file that is empty or begins with an object."""
        try:
            lines = _lines(_text(path)) or ["0 0 0 0 0"]
        except KsclError:
            lines = [""]
        words = lines[0].split()
        if len(words) >= 5 and all(_is_number(word) for word in words):
            return ""
        return "does not begin with a class number and coordinates"

    def is_damaged(self, path: Path, image_names: set[str]) -> bool:
        """Return whether an image has the same name."""
        return path.stem in image_names

    def read(self, files: Files) -> AnnotatedSet:
        """Read the labels, with the names of the classes from a file nearby if none are given."""
        classes = files.classes or _listed_classes(files)
        found = AnnotatedSet(self.name, classes)
        for name, path in files.annotations.items():
            image_path = files.image_of(name, path, found.problems)
            if image_path is not None:
                found.images += _read_labels(path, image_path, classes, found.problems)
        return found


def _listed_classes(files: Files) -> tuple[str, ...]:
    root, images = files.annotation_root, files.image_root
    folder = root if root.is_dir() else root.parent
    for near in dict.fromkeys((folder, folder.parent, images, images.parent)):
        for name in (*NAME_FILES, *YAML_FILES):
            path = near / name
            if path.is_file():
                try:
                    names = _yaml_names(path) if name in YAML_FILES else _lines(_text(path))
                except KsclError as error:
                    raise KsclError(f"{path} {error}. Correct the file.") from error
                return check_class_names(names, str(path))
    raise KsclError(
        f"{folder} has YOLO labels, whose classes are numbers, but neither it nor the folders "
        "around it have a classes.txt, obj.names or data.yaml with their names. Write one, or give "
        "the names in order to prepare_data.py with --classes NAME NAME …"
    )


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _yaml_names(path: Path) -> Sequence[str]:
    try:
        content = yaml.safe_load(_text(path))
    except yaml.YAMLError as error:
        raise KsclError(f"is not YAML: {error}") from error
    names = content.get("names") if isinstance(content, dict) else None
    if isinstance(names, dict) and set(names) == set(range(len(names))):
        names = [names[number] for number in range(len(names))]
    if not isinstance(names, list):
        raise KsclError("has no list 'names', numbered from 0")
    return names


def _text(path: Path) -> str:
    """Return a file's text; the message of the KsclError for a bad file is the reason alone."""
    try:
        return read_file(path).decode("utf-8-sig")
    except OSError as error:
        raise KsclError(f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise KsclError(f"is not UTF-8 text: {error}") from error


def _read_labels(
    path: Path, image_path: Path, classes: Sequence[str], problems: list[Problem]
) -> list[AnnotatedImage]:
    """Return the image with its labels in pixels, or nothing if either file cannot be read."""
    where = str(path)
    try:
        width, height = image_size(image_path)
    except UnusableImage as error:
        fix = f"{error.fix}, or remove it"
        problems.append(Problem("unreadable image", str(image_path), str(error), fix))
        return []
    try:
        lines = _text(path).splitlines()
    except KsclError as error:
        fix = "Write the labels again"
        problems.append(Problem("unreadable annotation", where, str(error), fix))
        return []
    objects = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            label, box = _parse(line, width, height)
            if label >= len(classes):
                raise ValueError(f"is of class {label}, but the list ends at {len(classes) - 1}")
        except ValueError as error:
            fix = "Correct the line, or delete it"
            problems.append(Problem("bad label", where, f"line {number} {error}", fix))
            continue
        what = f"line {number} ('{classes[label]}')"
        problems += check_box(box, width, height, where, what)
        if is_ordered(box):
            objects.append(AnnotatedObject(classes[label], box))
    return [AnnotatedImage("", image_path, width, height, tuple(objects), where)]


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
    if -ROUNDING <= value < 0:
        return 0.0
    return 1.0 if 1 < value <= 1 + ROUNDING else value


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False
