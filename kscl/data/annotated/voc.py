"""A folder in the layout of Pascal VOC: Annotations/*.xml, JPEGImages/*, ImageSets/Main/*.txt.

Any class list will do. Tags that many tools leave out are read as pose "Unspecified", truncated 0
and difficult 0; a missing (or zero) <size> is taken from the image; coordinates may be fractions.
The reader never stops at a problem: it notes it and continues, so that all are reported at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from kscl.data.annotated.annotations import (
    MAX_SIDE,
    AnnotatedImage,
    AnnotatedObject,
    AnnotatedSet,
    Box,
    Problem,
    check_box,
    check_class_names,
    class_problem,
    is_ordered,
    one_line_per_class,
)
from kscl.data.annotated.image_size import image_size
from kscl.data.annotated.voc_files import check_layout, image_files, read_split, take_out_odd_ids
from kscl.data.annotated.xml import parse_xml
from kscl.data.formats import IMAGE_EXTENSIONS
from kscl.data.source import read_file
from kscl.errors import KsclError

CLASSES_FILE = "classes.txt"  # beside Annotations/: the class list, one name per line
VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)


def read_voc(
    root: str | Path,
    split: str,
    class_names: Sequence[str] | None = None,
    *,
    name: str | None = None,
    with_images: bool = True,
) -> AnnotatedSet:
    """Read one split; without `with_images` only its annotations (enough to score)."""
    root = Path(root)
    label = name or f"voc:{root}:{split}"
    problems = check_layout(root, split, with_images)
    if problems:
        return AnnotatedSet(label, tuple(class_names or ()), problems=problems)
    classes = check_class_names(class_names or found_class_names(root), label)
    ids, problems = read_split(root, split)
    images = image_files(root / "JPEGImages") if with_images else None
    ids, odd = take_out_odd_ids(root, split, ids, images)
    found = AnnotatedSet(label, classes, problems=[*problems, *odd])
    for image_id in ids:
        image = _read_image(root, image_id, classes, images, found.problems)
        if image is not None:
            found.images.append(image)
    found.problems = one_line_per_class(found.problems)
    return found


def found_class_names(root: Path) -> tuple[str, ...]:
    """Return the names in classes.txt, or else all names in Annotations/ in alphabetical order."""
    listed = root / CLASSES_FILE
    if os.path.isfile(listed):
        try:
            lines = read_file(listed).decode("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise KsclError(f"{listed} cannot be read: {error}. Save it as UTF-8.") from error
        return check_class_names([line.strip() for line in lines if line.strip()], str(listed))
    names: set[str] = set()
    for path in sorted((root / "Annotations").rglob("*.xml")):
        try:
            names |= names_in(parse_xml(path))
        except KsclError:  # reported by the reader of the split that has it
            continue
    if not names:
        raise KsclError(
            f"{root / 'Annotations'}: no annotation names a class. Check that the XML files have "
            f"<object><name>, or list the classes in {listed}."
        )
    return tuple(sorted(names))


def names_in(tree: Element) -> set[str]:
    """Return the class names that an annotation uses."""
    return {_text(item, "name") for item in tree.findall("object")} - {""}


def _read_image(
    root: Path,
    image_id: str,
    classes: tuple[str, ...],
    images: dict[str, list[Path]] | None,
    problems: list[Problem],
) -> AnnotatedImage | None:
    path = root / "Annotations" / f"{image_id}.xml"
    where = str(path)
    image_path = None
    if images is not None:
        image_path = _choose_image(root, image_id, images, problems)
    if not os.path.exists(path):
        fix = "Add it (without <object> if the image shows none), or take the id off the split"
        problems.append(Problem("missing annotation", where, "there is no such file", fix))
        return None
    try:
        tree = parse_xml(path)
    except KsclError as error:
        fix = "Write the annotation again, or remove the id from the split"
        problems.append(Problem("unreadable annotation", where, str(error), fix))
        return None
    if images is not None and image_path is None:
        return None
    return read_tree(tree, image_id, image_path, where, classes, problems)


def read_tree(
    tree: Element,
    image_id: str,
    image_path: Path | None,
    where: str,
    classes: tuple[str, ...],
    problems: list[Problem],
) -> AnnotatedImage:
    """Return what one annotation says about its image; note every problem."""
    width, height = _size(tree, image_path, where, problems)
    objects = []
    for number, item in enumerate(tree.findall("object"), 1):
        thing = _read_object(item, f"object {number}", classes, where, problems)
        if thing is None:
            continue
        x1, y1, x2, y2 = thing.box
        box = f"xmin {x1 + 1:g}, ymin {y1 + 1:g}, xmax {x2:g}, ymax {y2:g}"
        what = f"object {number} ('{thing.name}', {box})"
        problems += check_box(thing.box, width, height, where, what)
        if is_ordered(thing.box):
            objects.append(thing)
    return AnnotatedImage(image_id, image_path, width, height, tuple(objects), where)


def _choose_image(
    root: Path, image_id: str, images: dict[str, list[Path]], problems: list[Problem]
) -> Path | None:
    files = images.get(image_id, [])
    if len(files) == 1:
        return files[0]
    where = str(root / "JPEGImages" / image_id)
    if files:
        names = ", ".join(sorted(file.name for file in files))
        problems.append(Problem("ambiguous image", where, f"there are {names}", "Keep one of them"))
    else:
        what = f"there is no image of this name ({', '.join(IMAGE_EXTENSIONS)})"
        fix = "Add the image, or take the id off the split"
        problems.append(Problem("missing image", where, what, fix))
    return None


def _size(
    tree: Element, image_path: Path | None, where: str, problems: list[Problem]
) -> tuple[int, int]:
    """Return (width, height) as written, or of the image; (0, 0) if neither is known."""
    texts = _text(tree, "size/width"), _text(tree, "size/height")
    try:
        width, height = (int(float(text)) for text in texts if text) if any(texts) else (0, 0)
    except (ValueError, OverflowError):
        fix = "Correct it, or delete <size>: it is then read from the image"
        problems.append(Problem("size", where, f"<size> is {texts}, not two numbers", fix))
        return 0, 0
    if 0 < width < MAX_SIDE and 0 < height < MAX_SIDE:
        return width, height
    if image_path is None:
        return 0, 0
    try:
        return image_size(image_path)
    except KsclError as error:
        fix = "Replace the image, or take the id off the split"
        what = f"its annotation has no <size>, and it {error}"
        problems.append(Problem("unreadable image", str(image_path), what, fix))
        return 0, 0


def _read_object(
    item: Element, what: str, classes: tuple[str, ...], where: str, problems: list[Problem]
) -> AnnotatedObject | None:
    name = _text(item, "name")
    if not name:
        problems.append(Problem("bad tag", where, f"{what} has no <name>", "Add the class"))
        return None
    if name not in classes:
        problems.append(class_problem(name, classes, where))
        return None
    try:
        box = _read_box(item)
        difficult, truncated = (_flag(item, tag) for tag in ("difficult", "truncated"))
    except ValueError as error:
        problems.append(Problem("bad tag", where, f"{what} ('{name}'): {error}", "Correct the tag"))
        return None
    return AnnotatedObject(name, box, difficult, truncated, _text(item, "pose") or "Unspecified")


def _read_box(item: Element) -> Box:
    box = item.find("bndbox")
    if box is None:
        raise ValueError("<bndbox> is missing")
    values = []
    for tag in ("xmin", "ymin", "xmax", "ymax"):
        text = _text(box, tag)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"<{tag}> is '{text}', not a number")
        values.append(value)
    # VOC counts pixels from 1 and includes the last one: (1, W) is the whole width, (0, W) here.
    return values[0] - 1, values[1] - 1, values[2], values[3]


def _flag(item: Element, tag: str) -> bool:
    text = _text(item, tag)
    if text.lower() in ("", "0", "false"):
        return False
    if text.lower() in ("1", "true"):
        return True
    raise ValueError(f"<{tag}> is '{text}', not 0 or 1")


def _text(element: Element, path: str) -> str:
    return (element.findtext(path) or "").strip()
