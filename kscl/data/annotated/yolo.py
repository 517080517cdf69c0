"""Labels in YOLO's text files: one per image, one object per line, in fractions of the image.

A line is `class x_center y_center width height`, or `class x1 y1 x2 y2 x3 y3 …` for the corners of
a polygon, whose bounding box is used. Names of the classes stand in a file beside the labels:
classes.txt, obj.names, or the `names` of data.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import yaml

from kscl.data.annotated.annotations import (
    AnnotatedImage,
    AnnotatedObject,
    Box,
    Problem,
    check_box,
    check_class_names,
    is_ordered,
)
from kscl.data.annotated.image_size import image_size
from kscl.data.source import read_file
from kscl.errors import KsclError

NAME_FILES = ("classes.txt", "obj.names", "predefined_classes.txt")
YAML_FILES = ("data.yaml", "data.yml", "dataset.yaml")
ROUNDING = 1e-3  # fractions are written with few digits: so far beyond an edge is on it


def read_class_names(folders: Iterable[Path]) -> tuple[str, ...] | None:
    """Return the class list of the first folder that has one, or None."""
    for folder in folders:
        for name in NAME_FILES:
            if (folder / name).is_file():
                lines = _text(folder / name).splitlines()
                names = [line.strip() for line in lines if line.strip()]
                return check_class_names(names, str(folder / name))
        for name in YAML_FILES:
            if (folder / name).is_file():
                return _yaml_names(folder / name)
    return None


def _yaml_names(path: Path) -> tuple[str, ...]:
    try:
        content = yaml.safe_load(_text(path))
    except yaml.YAMLError as error:
        raise KsclError(f"{path} is not YAML: {error}. Correct it.") from error
    names = content.get("names") if isinstance(content, dict) else None
    if isinstance(names, dict) and set(names) == set(range(len(names))):
        names = [names[number] for number in range(len(names))]
    if not isinstance(names, list):
        raise KsclError(f"{path} has no list 'names', numbered from 0. Add the class names.")
    return check_class_names(names, str(path))


def _text(path: Path) -> str:
    try:
        return read_file(path).decode("utf-8-sig")
    except OSError as error:
        raise KsclError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise KsclError(f"{path} is not text: {error}. Save it as UTF-8.") from error


def looks_like_labels(path: Path) -> bool:
    """Return whether a text file's first line is an object, or the file is empty."""
    try:
        lines = [line for line in _text(path).splitlines() if line.strip()]
    except KsclError:
        return False
    words = lines[0].split() if lines else []
    return not lines or (len(words) >= 5 and all(_is_number(word) for word in words))


def read_labels(
    path: Path,
    image_id: str,
    image_path: Path,
    classes: tuple[str, ...],
    problems: list[Problem],
) -> AnnotatedImage | None:
    """Return an image with its labels in pixels, or None if either file cannot be read."""
    where = str(path)
    try:
        width, height = image_size(image_path)
    except KsclError as error:
        fix = "Replace the image, or remove it"
        problems.append(Problem("unreadable image", str(image_path), str(error), fix))
        return None
    try:
        lines = _text(path).splitlines()
    except KsclError as error:
        fix = "Write the labels anew"
        problems.append(Problem("unreadable annotation", where, str(error), fix))
        return None
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
    return AnnotatedImage(image_id, image_path, width, height, tuple(objects), where)


def _parse(line: str, width: int, height: int) -> tuple[int, Box]:
    words = line.split()
    if not all(_is_number(word) for word in words) or not words[0].isdecimal():
        raise ValueError(f"is {line.strip()[:60]!r}, not a class number and coordinates")
    label, values = int(words[0]), [float(word) for word in words[1:]]
    if len(values) == 4:
        x, y, w, h = values
        corners = (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
    elif len(values) >= 6 and len(values) % 2 == 0:
        corners = (min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2]))
    else:
        raise ValueError(f"has {len(values)} numbers behind the class, not 4 or a polygon's")
    if max(values) > 1 + ROUNDING or min(values) < -ROUNDING:
        raise ValueError("has a number outside 0 to 1: coordinates are fractions of the image")
    clipped = [_snap(value) for value in corners]
    x1, y1, x2, y2 = clipped
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
