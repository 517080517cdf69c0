"""A COCO instances file: images, categories and boxes, with every problem told at once.

Classes are the categories in the order of their ids, as Detectron2 numbers them; a crowd is kept
as difficult, so neither finding nor missing it counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from kscl.data.annotated.annotations import (
    AnnotatedImage,
    AnnotatedObject,
    AnnotatedSet,
    Box,
    Problem,
    check_box,
    check_class_names,
    is_ordered,
)
from kscl.errors import KsclError

MEND_JSON = "Write the file anew with the tool it came from"


def read_coco(
    json_file: str | Path,
    image_root: str | Path | None = None,
    class_names: Sequence[str] | None = None,
    *,
    name: str | None = None,
) -> AnnotatedSet:
    """Read a whole file; without an image folder only annotations are looked at."""
    label = name or f"coco:{json_file}"
    where = str(json_file)
    try:
        content = load_json(json_file)
        categories = category_names(content, where)
    except KsclError as error:
        problem = Problem("unreadable annotation", where, str(error), MEND_JSON)
        return AnnotatedSet(label, tuple(class_names or ()), problems=[problem])
    found = AnnotatedSet(label, check_class_names(class_names or list(categories.values()), label))
    if image_root is not None and not Path(image_root).is_dir():
        problem = Problem("layout", str(image_root), "there is no such folder", "Check the path")
        found.problems.append(problem)
        return found
    images = _images_by_id(content, where, found.problems)
    objects: dict[Any, list[AnnotatedObject]] = {image_id: [] for image_id in images}
    for entry in content["annotations"]:
        thing = _read_object(entry, images, categories, found, where)
        if thing is not None:
            objects[entry["image_id"]].append(thing)
    for image_id, image in images.items():
        path = _path(image, image_root, found.problems) if image_root is not None else None
        if path is not None or image_root is None:
            size = int(image["width"]), int(image["height"])
            found.images.append(
                AnnotatedImage(str(image_id), path, *size, tuple(objects[image_id]), where)
            )
    return found


def load_json(json_file: str | Path) -> dict[str, Any]:
    """The file's content, or an error unless it has the three lists of an instances file."""
    try:
        with open(json_file, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise KsclError(f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise KsclError(f"is not JSON: {error}") from error
    for part in ("images", "categories", "annotations"):
        entries = content.get(part) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise KsclError(f"has no list '{part}', so it is no COCO instances file")
    return content


def read_category_names(json_file: str | Path) -> dict[Any, str]:
    """Class names by category id; a file of hundreds of megabytes is read once for them."""
    path = Path(json_file)
    try:
        stat = path.stat()
        return dict(_remembered_names(path, stat.st_mtime_ns, stat.st_size))
    except OSError as error:
        raise KsclError(f"{path} cannot be read: {error.strerror}. Check the path.") from error
    except KsclError as error:
        raise KsclError(f"{path} {error}. {MEND_JSON}.") from error


@lru_cache(maxsize=64)
def _remembered_names(path: Path, _changed: int, _size: int) -> tuple[tuple[Any, str], ...]:
    return tuple(category_names(load_json(path), str(path)).items())


def category_names(content: dict[str, Any], where: str) -> dict[Any, str]:
    """Class names by category id, in the order of the ids."""
    try:
        names = {entry["id"]: str(entry["name"]) for entry in content["categories"]}
        ordered = dict(sorted(names.items()))
    except (KeyError, TypeError) as error:
        raise KsclError(f"a category lacks an id or a name ({error})") from error
    if len(ordered) != len(content["categories"]):
        raise KsclError("two categories have the same id")
    check_class_names(list(ordered.values()), where)
    return ordered


def _images_by_id(
    content: dict[str, Any], where: str, problems: list[Problem]
) -> dict[Any, dict[str, Any]]:
    """Images in the order of their ids, as Detectron2 and pycocotools take them."""
    images: dict[Any, dict[str, Any]] = {}
    for entry in content["images"]:
        image_id, size = entry.get("id"), (entry.get("width"), entry.get("height"))
        if not isinstance(image_id, int | str) or not isinstance(entry.get("file_name"), str):
            what = f"the image {entry.get('file_name', image_id)!r} lacks an id or a file_name"
            problems.append(Problem("bad image entry", where, what, MEND_JSON))
        elif not all(isinstance(side, int | float) and 0 < side < math.inf for side in size):
            what = f"the image {entry['file_name']!r} has the size {size}"
            fix = "Write its width and height in pixels"
            problems.append(Problem("size", where, what, fix))
        elif image_id in images:
            what = f"two images have the id {image_id!r}: {entry['file_name']!r} is the second"
            problems.append(Problem("duplicate id", where, what, "Give every image its own id"))
        else:
            images[image_id] = entry
    if not images:
        what, fix = "the file lists no usable image", "Name another file, or add images"
        problems.append(Problem("empty split", where, what, fix))
    try:
        return dict(sorted(images.items()))
    except TypeError:
        what = "some image ids are numbers and others texts"
        problems.append(Problem("bad image entry", where, what, "Use one kind of id"))
        return images


def _read_object(
    entry: dict[str, Any],
    images: dict[Any, dict[str, Any]],
    categories: dict[Any, str],
    found: AnnotatedSet,
    where: str,
) -> AnnotatedObject | None:
    what = f"annotation {entry.get('id')!r}"
    image = images.get(_id(entry.get("image_id")))
    if image is None:
        text = f"{what} belongs to the image {entry.get('image_id')!r}, which is not there"
        fix = "Add the image to the file, or delete the annotation"
        found.problems.append(Problem("lost annotation", where, text, fix))
        return None
    what += f" of {image['file_name']!r}"
    name = categories.get(_id(entry.get("category_id")))
    if name not in found.class_names:
        text = (
            f"{what} is of the class {name or entry.get('category_id')!r}, which is not in the list"
        )
        fix = f"Add it to the class list ({', '.join(found.class_names[:20])}), or correct it"
        found.problems.append(Problem("unknown class", where, text, fix))
        return None
    try:
        box = _box(entry.get("bbox"))
        area = float(entry["area"]) if entry.get("area") is not None else None
    except (TypeError, ValueError):
        text = f"{what} has the bbox {entry.get('bbox')!r} and the area {entry.get('area')!r}"
        fix = "A bbox is [x, y, width, height], an area a number"
        found.problems.append(Problem("bad box", where, text, fix))
        return None
    crowd = bool(entry.get("iscrowd", 0))
    what += f" ('{name}', bbox {entry['bbox']})"
    found.problems += check_box(box, int(image["width"]), int(image["height"]), where, what)
    if not is_ordered(box):
        return None
    return AnnotatedObject(str(name), box, difficult=crowd, area=area)


def _id(value: Any) -> int | float | str | None:
    return value if isinstance(value, int | float | str) else None  # a list could not be looked up


def _box(values: Any) -> Box:
    x, y, width, height = (float(value) for value in values)
    if not all(math.isfinite(value) for value in (x, y, width, height)):
        raise ValueError("not finite")
    return x, y, x + width, y + height


def _path(image: dict[str, Any], image_root: str | Path, problems: list[Problem]) -> Path | None:
    path = Path(image_root, image["file_name"])
    if path.is_file():
        return path
    fix = "Add the image, or correct its file_name or the image folder"
    problems.append(Problem("missing image", str(path), "there is no such file", fix))
    return None
