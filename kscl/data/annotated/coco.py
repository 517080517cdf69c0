"""Read a COCO instances file: images, boxes and masks, with all problems reported at once.

What Detectron2 and pycocotools would trip over or silently misread is a problem too: repeated
annotation ids, an area that is not a number, "no" for a crowd flag. Classes are the categories in
the order of their ids, as Detectron2 numbers them; a crowd is kept as difficult, so neither finding
nor missing it counts.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from kscl.data.annotations import (
    MAX_SIDE,
    UNREADABLE,
    AnnotatedObject,
    AnnotatedSet,
    AnnotationFormat,
    Box,
    Classes,
    Files,
    Refusal,
    Source,
    annotation_format,
    check_class_names,
    leads_out,
)
from kscl.data.masks import is_number, read_mask
from kscl.data.source import read_file, read_text
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

Entry = dict[str, Any]
FindImage = Callable[[str], Path | None]  # from a file_name; KsclError if several images have it


@annotation_format
class Coco(AnnotationFormat):
    """One JSON file for all images."""

    name = "coco"
    files = "a COCO .json"
    suffix = ".json"
    form = "coco:FILE.json:IMAGE_FOLDER"
    official = COCO_NAMES
    crowds = True

    def refusal(self, path: Path, image_names: set[str]) -> Refusal | None:
        """Accept a file with the lists of COCO; one that is not even JSON is damaged."""
        try:
            reason = _other_than_coco(read_json(path))
        except KsclError as error:
            return Refusal(str(error), damaged=True)
        return Refusal(reason, damaged=False) if reason else None

    def read(self, files: Files) -> AnnotatedSet:
        """Read one or more files; their images may be anywhere below the image folder."""
        found = AnnotatedSet(self.name, ())
        for path in files.annotations.values():
            reading = read_coco(path, files.image_root, find_image=partial(_find, files, path))
            found.images += reading.images
            found.problems += reading.problems
            found.class_names = tuple(dict.fromkeys(found.class_names + reading.class_names))
        return found

    def read_set(self, source: Source, classes: Classes, images: bool, masks: bool) -> AnnotatedSet:
        root = source.root if images else None
        return read_coco(source.truth, root, classes, name=source.name, with_masks=masks)

    def class_names(self, source: Source) -> tuple[str, ...]:
        return tuple(read_category_names(source.truth).values())


def _find(files: Files, json_file: Path, file_name: str) -> Path | None:
    """Return the image with this path below a folder, or else with this name."""
    root, folder = files.image_root, Path(os.path.abspath(json_file.parent))
    inside = [root]
    if folder.is_relative_to(os.path.abspath(root)):  # each folder may have its own file
        inside.append(root / folder.relative_to(os.path.abspath(root)))
    return (
        _below(inside, file_name)
        or files.find([file_name])
        # The name may begin with that of the folder of images.
        or _below([root.parent, json_file.parent], file_name)
    )


def _below(roots: Iterable[str | Path], file_name: str) -> Path | None:
    return next((p for root in roots if os.path.isfile(p := Path(root, file_name))), None)


def read_coco(
    json_file: str | Path,
    image_root: str | Path | None = None,
    class_names: Classes = None,
    *,
    name: str | None = None,
    with_masks: bool = False,
    find_image: FindImage | None = None,
) -> AnnotatedSet:
    """Read a whole file; without an image folder only its annotations.

    Masks take most of a file's memory; they are kept, and compared with the boxes, only
    `with_masks`. An image is its file_name below the folder, or what `find_image` returns.
    """
    found = AnnotatedSet(name or f"coco:{json_file}", tuple(class_names or ()))
    try:
        content = load_json(json_file)
        categories = category_names(content, json_file)
    except KsclError as error:
        found.note(UNREADABLE, json_file, error, WRITE_AGAIN)
        return found
    found.class_names = check_class_names(class_names or list(categories.values()), found.name)
    if image_root is not None and not os.path.isdir(image_root):
        found.note("layout", image_root, "there is no such folder", "Check the path")
        return found
    images = _images_by_id(content["images"], json_file, found)
    entries: dict[Any, list[Entry]] = defaultdict(list)
    for entry in content["annotations"]:
        image_id = _id(entry.get("image_id"))
        if image_id in images:
            entries[image_id].append(entry)
        else:
            what = f"annotation {entry.get('id')!r} belongs to the image {entry.get('image_id')!r}"
            fix = "Add the image to the file, or delete the annotation"
            found.note("lost annotation", json_file, f"{what}, which is not there", fix)
    for image_id, image in images.items():
        size = int(image["width"]), int(image["height"])
        path = None
        if image_root is not None:
            path = _image_path(image["file_name"], Path(image_root), find_image, found)
        objects = _objects(entries[image_id], image, categories, json_file, found, with_masks)
        found.add_image(path, size, objects, json_file, str(image_id))
        if image_root is not None and path is None:
            found.images.pop()  # its objects were checked all the same
    _check_annotation_ids(content["annotations"], json_file, found)
    return found


def _image_path(
    file_name: str, root: Path, find: FindImage | None, found: AnnotatedSet
) -> Path | None:
    try:
        path = find(file_name) if find is not None else _below([root], file_name)
    except KsclError as error:
        fix = "Write the path of the image as its file_name"
        found.note("ambiguous image", root / file_name, error, fix)
        return None
    if path is None:
        fix = "Add the image, or correct its file_name or the image folder"
        found.note("missing image", root / file_name, "there is no such file", fix)
    return path


def read_json(json_file: str | Path) -> Any:
    """Return the file's content; raise KsclError, without its name, if it is damaged."""
    text = read_text(json_file, partial(read_file, max_bytes=sys.maxsize))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise KsclError(f"is not JSON: {error}") from error


def load_json(json_file: str | Path) -> Entry:
    """Return the file's content; raise KsclError unless it has the three lists of COCO."""
    content = read_json(json_file)
    if reason := _other_than_coco(content):
        raise KsclError(reason)
    return content


def _other_than_coco(content: Any) -> str:
    for part in ("images", "categories", "annotations"):
        entries = content.get(part) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            return f"has no list '{part}', so it is not a COCO instances file"
    return ""


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
    return tuple(category_names(load_json(path), path).items())


def category_names(content: Entry, where: str | Path) -> dict[Any, str]:
    """Return class names by category id, in the order of the ids."""
    categories = content["categories"]
    for entry in categories:
        if _id(entry.get("id")) is None or not isinstance(entry.get("name"), str):
            raise KsclError(f"is not usable: a category lacks an id or a name ({str(entry)[:200]})")
    names = {entry["id"]: entry["name"] for entry in categories}
    if len(names) != len(categories):
        raise KsclError("has two categories with the same id")
    if len({type(key) for key in names}) > 1:
        raise KsclError("has numbers and texts as category ids")
    check_class_names(list(names.values()), where)
    return dict(sorted(names.items()))


def _images_by_id(entries: list[Entry], where: str | Path, found: AnnotatedSet) -> dict[Any, Entry]:
    """Return images in the order of their ids, as Detectron2 and pycocotools take them."""
    images: dict[Any, Entry] = {}
    for entry in entries:
        image_id, name = entry.get("id"), entry.get("file_name")
        size = entry.get("width"), entry.get("height")
        what, kind = f"the image {name or image_id!r}", "bad image entry"
        if _id(image_id) is None or not isinstance(name, str):
            found.note(kind, where, f"{what} lacks an id or a file_name", WRITE_AGAIN)
        elif not all(_is_side(side) for side in size):
            fix = "Write its width and height in pixels"
            found.note("size", where, f"{what} has the size {size}", fix)
        elif leads_out(name):
            fix = "Write its path relative to the image folder"
            found.note(kind, where, f"the image {name!r} is not below the image folder", fix)
        elif image_id in images:
            what = f"two images have the id {image_id!r}: {name!r} is the second"
            found.note("duplicate id", where, what, "Give every image its own id")
        else:
            images[image_id] = entry
    if not images:
        fix = "Name another file, or add images"
        found.note("empty split", where, "the file lists no usable image", fix)
    if len({type(image_id) for image_id in images}) > 1:
        what = "some image ids are numbers and others texts"
        found.note("bad image entry", where, what, "Use one kind of id")
        return images
    return dict(sorted(images.items()))


def _objects(
    entries: Iterable[Entry],
    image: Entry,
    categories: dict[Any, str],
    where: str | Path,
    found: AnnotatedSet,
    with_masks: bool,
) -> Iterator[tuple[AnnotatedObject, str]]:
    """Yield the objects of an image, and note the annotations that cannot be read."""
    for entry in entries:
        what = f"annotation {entry.get('id')!r} of {image['file_name']!r}"
        name = categories.get(_id(entry.get("category_id")))
        if name is None:
            text = f"the category {entry.get('category_id')!r} is not among those of the file"
            fix = "Add it to the categories, or correct the annotations"
            found.note("unknown class", where, f"{what}: {text}", fix)
            continue
        kind = "bad box"
        try:
            box = _box(entry.get("bbox"))
            kind = "bad annotation"
            area, crowd = entry.get("area"), entry.get("iscrowd", 0)
            if area is not None and not is_number(area, least=0):
                raise ValueError(f"its area is {area!r}, not a number of pixels")
            if not isinstance(crowd, int | float) or crowd not in (0, 1):
                raise ValueError(f"its iscrowd is {crowd!r}, not 0 or 1")
            kind = "bad mask"
            mask = read_mask(entry.get("segmentation"))
        except ValueError as error:
            found.note(kind, where, f"{what}: {error}", "Correct the annotation, or delete it")
            continue
        thing = AnnotatedObject(
            name,
            box,
            difficult=bool(crowd),
            area=None if area is None else float(area),
            mask=mask if with_masks else None,
        )
        yield thing, f"{what} ('{name}', bbox {entry['bbox']})"


def _check_annotation_ids(entries: list[Entry], where: str | Path, found: AnnotatedSet) -> None:
    """Note missing and repeated ids, by which pycocotools looks annotations up."""
    fix = "Number the annotations again"
    ids = Counter(_id(entry.get("id")) for entry in entries)
    if None in ids:
        what = f"{ids.pop(None)} of {len(entries)} annotations have no id"
        found.note("annotation id", where, what, fix)
    for value, count in ids.items():
        if count > 1:
            found.note("annotation id", where, f"{count} annotations have the id {value!r}", fix)


def _id(value: Any) -> int | str | None:
    """Return an id of a file, or None for anything else: a list could not be looked up."""
    return value if isinstance(value, int | str) and not isinstance(value, bool) else None


def _is_side(value: Any) -> bool:
    return is_number(value, 1, MAX_SIDE) and value == int(value)


def _box(values: Any) -> Box:
    if not (isinstance(values, list) and len(values) == 4 and all(map(is_number, values))):
        raise ValueError(f"its bbox is {values!r}, not [x, y, width, height]")
    x, y, width, height = (float(value) for value in values)
    return x, y, x + width, y + height
