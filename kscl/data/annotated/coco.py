"""Read a COCO instances file: images, boxes and masks, with all problems reported at once.

What Detectron2 and pycocotools would trip over or silently misread is a problem too: repeated
annotation ids, an area that is not a number, "no" for a crowd flag. Classes are the categories in
the order of their ids, as Detectron2 numbers them; a crowd is kept as difficult, so neither finding
nor missing it counts.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from kscl.data.annotations import (
    MAX_SIDE,
    UNKNOWN_CLASS,
    AnnotatedImage,
    AnnotatedObject,
    AnnotatedSet,
    AnnotationFormat,
    Box,
    Files,
    Problem,
    Source,
    annotation_format,
    check_box,
    check_class_names,
    check_mask,
    class_problem,
    is_ordered,
    leads_out,
    one_line_per_class,
)
from kscl.data.masks import read_mask
from kscl.data.source import open_regular
from kscl.errors import KsclError

WRITE_AGAIN = "Write the file again with the tool it came from"

COCO_NAMES = {
    f"coco_{name}": (f"coco/annotations/instances_{file}.json", f"coco/{images}")
    for name, file, images in (
        ("2014_train", "train2014", "train2014"),
        ("2014_val", "val2014", "val2014"),
        ("2014_minival", "minival2014", "val2014"),
        ("2014_valminusminival", "valminusminival2014", "val2014"),
        ("2017_train", "train2017", "train2017"),
        ("2017_val", "val2017", "val2017"),
        ("2017_val_100", "val2017_100", "val2017"),
    )
}

FindImage = Callable[[str], Path | Problem]  # from a file_name


@annotation_format
class Coco(AnnotationFormat):
    """One JSON file for all images."""

    name = "coco"
    files = "a COCO .json"
    suffix = ".json"
    form = "coco:FILE.json:IMAGE_FOLDER"
    official = COCO_NAMES
    crowds = True

    def refusal(self, path: Path) -> str:
        try:
            load_json(path)
        except KsclError as error:
            return str(error)
        return ""

    def is_damaged(self, path: Path, image_names: set[str]) -> bool:
        """Return whether the file is not even JSON."""
        try:
            read_json(path)
        except KsclError:
            return True
        return False

    def read(self, files: Files) -> AnnotatedSet:
        """Read one or more files, whose images may lie anywhere below the folder of images."""
        found = AnnotatedSet(self.name, ())
        root = files.image_root
        for path in files.annotations.values():
            inside, folder = [root], Path(os.path.abspath(path.parent))
            if folder.is_relative_to(os.path.abspath(root)):  # each folder may have its own file
                inside.append(root / folder.relative_to(os.path.abspath(root)))
            find = partial(_find_image, files, inside, [root.parent, path.parent])
            reading = read_coco(path, find_image=find)
            found.images += reading.images
            found.problems += reading.problems
            found.class_names = tuple(dict.fromkeys(found.class_names + reading.class_names))
        return found

    def read_set(
        self,
        source: Source,
        class_names: Sequence[str] | None,
        with_images: bool,
        with_masks: bool,
    ) -> AnnotatedSet:
        images = source.root if with_images else None
        assert source.annotations is not None
        return read_coco(
            source.annotations, images, class_names, name=source.name, with_masks=with_masks
        )

    def class_names(self, source: Source) -> tuple[str, ...]:
        assert source.annotations is not None
        return tuple(read_category_names(source.annotations).values())


def _find_image(
    files: Files, inside: list[Path], outside: list[Path], file_name: str
) -> Path | Problem:
    """Return the image with this path below a folder, or else with this name, or the problem."""
    try:
        image = (
            _below(inside, file_name)
            or files.find([file_name])
            or _below(outside, file_name)  # the name may begin with that of the folder of images
        )
    except KsclError as error:
        fix = "Write the path of the image as its file_name"
        return Problem("ambiguous image", str(inside[0] / file_name), str(error), fix)
    return image or _missing_image(inside[0] / file_name)


def _below(roots: list[Path], file_name: str) -> Path | None:
    return next((root / file_name for root in roots if os.path.isfile(root / file_name)), None)


def read_coco(
    json_file: str | Path,
    image_root: str | Path | None = None,
    class_names: Sequence[str] | None = None,
    *,
    name: str | None = None,
    with_masks: bool = False,
    find_image: FindImage | None = None,
) -> AnnotatedSet:
    """Read a whole file; without an image folder or `find_image` only its annotations.

    Masks take most of a file's memory; they are kept, and compared with the boxes, only
    `with_masks`.
    """
    label = name or f"coco:{json_file}"
    where = str(json_file)
    try:
        content = load_json(json_file)
        categories = category_names(content, where)
    except KsclError as error:
        problem = Problem("unreadable annotation", where, str(error), WRITE_AGAIN)
        return AnnotatedSet(label, tuple(class_names or ()), problems=[problem])
    found = AnnotatedSet(label, check_class_names(class_names or list(categories.values()), label))
    if image_root is not None and not os.path.isdir(image_root):
        problem = Problem("layout", str(image_root), "there is no such folder", "Check the path")
        found.problems.append(problem)
        return found
    images = _images_by_id(content, where, found.problems)
    objects: dict[Any, list[AnnotatedObject]] = {image_id: [] for image_id in images}
    for entry in content["annotations"]:
        thing = _read_object(entry, images, categories, found, where, with_masks)
        if thing is not None:
            objects[entry["image_id"]].append(thing)
    found.problems += _id_problems(content["annotations"], where)
    if image_root is not None:
        find_image = partial(_in_folder, image_root)
    for image_id, image in images.items():
        path = find_image(image["file_name"]) if find_image else None
        if isinstance(path, Problem):
            found.problems.append(path)
            continue
        size = int(image["width"]), int(image["height"])
        found.images.append(
            AnnotatedImage(str(image_id), path, *size, tuple(objects[image_id]), where)
        )
    found.problems = one_line_per_class(found.problems)
    return found


def read_json(json_file: str | Path) -> Any:
    """Return the file's content; raise KsclError, without its name, if it is damaged."""
    try:
        with open_regular(json_file) as file:
            return json.loads(file.read().decode("utf-8-sig"))
    except OSError as error:
        raise KsclError(f"cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise KsclError(f"is not JSON: {error}") from error


def load_json(json_file: str | Path) -> dict[str, Any]:
    """Return the file's content; raise KsclError unless it has the three lists of COCO."""
    content = read_json(json_file)
    for part in ("images", "categories", "annotations"):
        entries = content.get(part) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise KsclError(f"has no list '{part}', so it is not a COCO instances file")
    return content


def read_category_names(json_file: str | Path) -> dict[Any, str]:
    """Return class names by category id; a file of hundreds of megabytes is read once for them."""
    path = Path(json_file)
    try:
        stat = path.stat()
        return dict(_remembered_names(path, stat.st_mtime_ns, stat.st_size))
    except KsclError as error:
        raise KsclError(f"{path} {error}. {WRITE_AGAIN}.") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "") or error
        raise KsclError(f"{path} cannot be read: {reason}. Check the path.") from error


@lru_cache(maxsize=64)
def _remembered_names(path: Path, _changed: int, _size: int) -> tuple[tuple[Any, str], ...]:
    return tuple(category_names(load_json(path), str(path)).items())


def category_names(content: dict[str, Any], where: str) -> dict[Any, str]:
    """Return class names by category id, in the order of the ids."""
    categories = content["categories"]
    for entry in categories:
        if not _is_id(entry.get("id")) or not isinstance(entry.get("name"), str):
            raise KsclError(f"is not usable: a category lacks an id or a name ({str(entry)[:200]})")
    names = {entry["id"]: entry["name"] for entry in categories}
    if len(names) != len(categories):
        raise KsclError("has two categories with the same id")
    if len({type(key) for key in names}) > 1:
        raise KsclError("has numbers and texts as category ids")
    check_class_names(list(names.values()), where)
    return dict(sorted(names.items()))


def _images_by_id(
    content: dict[str, Any], where: str, problems: list[Problem]
) -> dict[Any, dict[str, Any]]:
    """Return images in the order of their ids, as Detectron2 and pycocotools take them."""
    images: dict[Any, dict[str, Any]] = {}
    for entry in content["images"]:
        image_id, size = entry.get("id"), (entry.get("width"), entry.get("height"))
        if not _is_id(image_id) or not isinstance(entry.get("file_name"), str):
            what = f"the image {entry.get('file_name', image_id)!r} lacks an id or a file_name"
            problems.append(Problem("bad image entry", where, what, WRITE_AGAIN))
        elif not all(_is_side(side) for side in size):
            what = f"the image {entry['file_name']!r} has the size {size}"
            fix = "Write its width and height in pixels"
            problems.append(Problem("size", where, what, fix))
        elif leads_out(entry["file_name"]):
            what = f"the image {entry['file_name']!r} is not below the image folder"
            fix = "Write its path relative to the image folder"
            problems.append(Problem("bad image entry", where, what, fix))
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
    with_masks: bool,
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
    if name is None:
        text = f"the category {entry.get('category_id')!r} is not among those of the file"
        fix = "Add it to the categories, or correct the annotations"
        found.problems.append(Problem(UNKNOWN_CLASS, where, text, fix))
        return None
    if name not in found.class_names:
        found.problems.append(class_problem(name, found.class_names, where))
        return None
    kind = "bad box"
    try:
        box = _box(entry.get("bbox"))
        kind = "bad annotation"
        area = entry.get("area")
        if area is not None and not _is_number(area, least=0):
            raise ValueError(f"its area is {area!r}, not a number of pixels")
        crowd = entry.get("iscrowd", 0)
        if not isinstance(crowd, int | float) or crowd not in (0, 1):
            raise ValueError(f"its iscrowd is {crowd!r}, not 0 or 1")
        kind = "bad mask"
        mask = read_mask(entry.get("segmentation"))
    except ValueError as error:
        fix = "Correct the annotation, or delete it"
        found.problems.append(Problem(kind, where, f"{what}: {error}", fix))
        return None
    what += f" ('{name}', bbox {entry['bbox']})"
    found.problems += check_box(box, int(image["width"]), int(image["height"]), where, what)
    if mask is not None and with_masks:
        size = int(image["width"]), int(image["height"])
        found.problems += check_mask(mask, box, *size, where, what)
    if not is_ordered(box):
        return None
    return AnnotatedObject(
        name,
        box,
        difficult=bool(crowd),
        area=None if area is None else float(area),
        mask=mask if with_masks else None,
    )


def _id_problems(entries: list[dict[str, Any]], where: str) -> list[Problem]:
    """Return what is wrong with annotation ids, by which pycocotools looks annotations up."""
    fix = "Number the annotations again"
    ids = [entry.get("id") for entry in entries]
    bad = sum(not _is_id(value) for value in ids)
    problems = []
    if bad:
        what = f"{bad} of {len(ids)} annotations have no id"
        problems.append(Problem("annotation id", where, what, fix))
    repeated = {k: n for k, n in Counter(value for value in ids if _is_id(value)).items() if n > 1}
    for value, count in repeated.items():
        what = f"{count} annotations have the id {value!r}"
        problems.append(Problem("annotation id", where, what, fix))
    return problems


def _id(value: Any) -> int | str | None:
    return value if _is_id(value) else None  # a list could not be looked up


def _is_id(value: Any) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _is_number(value: Any, least: float = -math.inf) -> bool:
    """Return whether a value is a finite number; NaN, texts and integers too large are not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return least <= value and abs(value) < 1e18


def _is_side(value: Any) -> bool:
    return _is_number(value, least=1) and value < MAX_SIDE and value == int(value)


def _box(values: Any) -> Box:
    if not (isinstance(values, list) and len(values) == 4 and all(map(_is_number, values))):
        raise ValueError(f"its bbox is {values!r}, not [x, y, width, height]")
    x, y, width, height = (float(value) for value in values)
    return x, y, x + width, y + height


def _in_folder(image_root: str | Path, file_name: str) -> Path | Problem:
    path = Path(image_root, file_name)
    return path if os.path.isfile(path) else _missing_image(path)


def _missing_image(path: Path) -> Problem:
    fix = "Add the image, or correct its file_name or the image folder"
    return Problem("missing image", str(path), "there is no such file", fix)
