"""Pascal VOC: Annotations/*.xml, JPEGImages/*, ImageSets/Main/*.txt; or LabelImg's files alone.

Any class list will do. Tags that many tools leave out are read as pose "Unspecified", truncated 0
and difficult 0; a missing (or zero) <size> is taken from the image; coordinates may be fractions.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree.ElementTree import Element, TreeBuilder, XMLParser, fromstring, indent, tostring

from kscl.data.annotations import (
    DATASETS_VARIABLE,
    MAX_SIDE,
    UNREADABLE,
    AnnotatedObject,
    AnnotatedSet,
    AnnotationFormat,
    Box,
    Classes,
    Files,
    Source,
    annotation_format,
    check_class_names,
    image_size,
    leads_out,
    unreadable_image,
)
from kscl.data.formats import IMAGE_EXTENSIONS, UnreadableImage, is_image
from kscl.data.source import Walk, read_file, read_lines, walk_files
from kscl.errors import KsclError

CLASSES_FILE = "classes.txt"  # beside Annotations/: the class list, one name per line
VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)
VOC_NAMES = {
    f"voc_{year}_{split}": (f"VOC{year}", split)
    for year in (2007, 2012)
    for split in ("trainval", "train", "val", "test")
    if (year, split) != (2012, "test")  # its annotations were never published
}
MAX_BYTES = 64 * 2**20  # the largest annotation files of public sets are a hundred times smaller
WRITE_AGAIN = "Write the annotation again, or remove the file"

Images = dict[str, list[Path]]  # by id


@annotation_format
class Voc(AnnotationFormat):
    """One XML file per image."""

    name = "voc"
    files = "LabelImg's or VOC's .xml files"
    suffix = ".xml"
    form = "voc:FOLDER:SPLIT"
    official = VOC_NAMES
    image_subfolder = "JPEGImages"

    def read(self, files: Files) -> AnnotatedSet:
        """Read XML files, which belong to the image of the same name or of their <filename>."""
        found = AnnotatedSet(self.name, ())
        trees = {}
        for name, path in files.annotations.items():
            try:
                trees[name] = parse_xml(path)
            except KsclError as error:
                found.note(UNREADABLE, path, error, WRITE_AGAIN)
        found.class_names = tuple(sorted({n for tree in trees.values() for n in _names_in(tree)}))
        for name, tree in trees.items():
            image = files.image_of(name, found, [_text(tree, "filename")])
            if image is not None:
                _add_image(tree, "", image, files.annotations[name], found)
        return found

    def source(self, first: str, last: str, root: Path = Path()) -> Source:
        return Source("", self.name, root / first, split=last)

    def read_set(self, source: Source, classes: Classes, images: bool, masks: bool) -> AnnotatedSet:
        """Read one split; a public set has VOC's own classes unless others are given."""
        classes = classes or (VOC_CLASSES if source.official else None)
        found = read_voc(source.root, source.split, classes, name=source.name, with_images=images)
        if source.official and not os.path.isdir(source.root):
            now = os.getenv(DATASETS_VARIABLE)
            fix = (
                f"Run kscl prepare voc --root {source.root.parent} to download it; "
                f"if you have it, set {DATASETS_VARIABLE} to the folder that holds "
                f"{source.root.name} ({f'now {now}' if now else 'not set, so ./datasets is used'})"
            )
            found.problems = [replace(problem, fix=fix) for problem in found.problems]
        return found

    def class_names(self, source: Source) -> tuple[str, ...]:
        """Return VOC's own classes for a public set, or else those of the folder."""
        if source.official:
            return VOC_CLASSES
        found = AnnotatedSet(source.name, ())
        _check_layout(source.root, source.split, True, found)
        found.checked()
        return found_class_names(source.root)

    def has_class_list(self, source: Source) -> bool:
        """Return whether there is a list, not just names in XML files."""
        return source.official or os.path.isfile(source.root / CLASSES_FILE)


def read_voc(
    root: str | Path,
    split: str,
    class_names: Classes = None,
    *,
    name: str | None = None,
    with_images: bool = True,
) -> AnnotatedSet:
    """Read one split; without `with_images` only its annotations (enough to score)."""
    root = Path(root)
    found = AnnotatedSet(name or f"voc:{root}:{split}", tuple(class_names or ()))
    _check_layout(root, split, with_images, found)
    if found.problems:
        return found
    found.class_names = check_class_names(class_names or found_class_names(root), found.name)
    ids = read_split(root, split, found)
    images = image_files(root / "JPEGImages") if with_images else None
    for image_id in _without_odd_ids(root, split, ids, images, found):
        path = root / "Annotations" / f"{image_id}.xml"
        image = None if images is None else choose_image(root, image_id, images, found)
        if not os.path.exists(path):
            fix = "Add it (without <object> if the image shows none), or remove the id"
            found.note("missing annotation", path, "there is no such file", fix)
            continue
        try:
            tree = parse_xml(path)
        except KsclError as error:
            found.note(UNREADABLE, path, error, WRITE_AGAIN)
        else:
            if images is None or image is not None:
                _add_image(tree, image_id, image, path, found)
    return found


def found_class_names(root: Path) -> tuple[str, ...]:
    """Return the names in classes.txt, or else all names in Annotations/ in alphabetical order."""
    listed = root / CLASSES_FILE
    if os.path.isfile(listed):
        try:
            return check_class_names(read_lines(listed), listed)
        except KsclError as error:
            raise KsclError(f"{listed} {error}. Correct the file.") from error
    names: set[str] = set()
    for path in sorted((root / "Annotations").rglob("*.xml")):
        try:
            names |= _names_in(parse_xml(path))
        except KsclError:  # reported by the reader of the split that has it
            continue
    if not names:
        raise KsclError(
            f"{root / 'Annotations'}: no annotation names a class. Check that the XML files have "
            f"<object><name>, or list the classes in {listed}."
        )
    return tuple(sorted(names))


def _names_in(tree: Element) -> set[str]:
    return {_text(item, "name") for item in tree.findall("object")} - {""}


def _add_image(
    tree: Element, image_id: str, image: Path | None, path: Path, found: AnnotatedSet
) -> None:
    size = _size(tree, image, path, found)
    found.add_image(image, size, _objects(tree, path, found), path, image_id)


def choose_image(root: Path, image_id: str, images: Images, found: AnnotatedSet) -> Path | None:
    """Return the image of an id, or note why there is not one."""
    files = images.get(image_id, [])
    if len(files) == 1:
        return files[0]
    where = root / "JPEGImages" / image_id
    if files:
        names = ", ".join(sorted(file.name for file in files))
        found.note("ambiguous image", where, f"there are {names}", "Keep one of them")
    else:
        what = f"there is no image of this name ({', '.join(IMAGE_EXTENSIONS)})"
        found.note("missing image", where, what, "Add the image, or remove the id from the split")
    return None


def _size(tree: Element, image: Path | None, path: Path, found: AnnotatedSet) -> tuple[int, int]:
    """Return (width, height) as written, or of the image; (0, 0) if neither is known."""
    texts = _text(tree, "size/width"), _text(tree, "size/height")
    try:
        width, height = (int(float(text)) for text in texts if text) if any(texts) else (0, 0)
    except (ValueError, OverflowError):
        fix = "Correct it, or delete <size>: it is then read from the image"
        found.note("size", path, f"<size> is {texts}, not two numbers", fix)
        return 0, 0
    if 0 < width < MAX_SIDE and 0 < height < MAX_SIDE:
        return width, height
    try:
        return (0, 0) if image is None else image_size(image)
    except UnreadableImage as error:
        assert image is not None
        found.problems.append(unreadable_image(image, error))
        return 0, 0


def _objects(
    tree: Element, path: Path, found: AnnotatedSet
) -> Iterator[tuple[AnnotatedObject, str]]:
    """Yield the objects of an image, and note those that cannot be read."""
    for number, item in enumerate(tree.findall("object"), 1):
        name = _text(item, "name")
        try:
            if not name:
                raise ValueError("<name> is missing")
            box = _read_box(item)
            difficult, truncated = (_flag(item, tag) for tag in ("difficult", "truncated"))
        except ValueError as error:
            found.note("bad tag", path, f"object {number} ('{name}'): {error}", "Correct the tag")
            continue
        pose = _text(item, "pose") or "Unspecified"
        x1, y1, x2, y2 = box
        corners = f"xmin {x1 + 1:g}, ymin {y1 + 1:g}, xmax {x2:g}, ymax {y2:g}"
        thing = AnnotatedObject(name, box, difficult, truncated, pose)
        yield thing, f"object {number} ('{name}', {corners})"


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
    values = {"": False, "0": False, "false": False, "1": True, "true": True}
    if text.lower() not in values:
        raise ValueError(f"<{tag}> is '{text}', not 0 or 1")
    return values[text.lower()]


def _text(element: Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _check_layout(root: Path, split: str, with_images: bool, found: AnnotatedSet) -> None:
    """Look for the folders and the split file without which nothing else makes sense."""
    if not os.path.isdir(root):
        found.note("layout", root, "there is no such folder", "Check the path")
        return
    inner = sorted(path.parent for path in root.glob("*/ImageSets"))
    for folder in ("Annotations", "ImageSets/Main", *(["JPEGImages"] if with_images else [])):
        if not os.path.isdir(root / folder):
            hint = f"Perhaps you mean {inner[0]}" if inner else "Arrange the set as Pascal VOC is"
            found.note("layout", root, f"it has no folder {folder}", hint)
        elif not os.access(root / folder, os.R_OK | os.X_OK):
            what = f"its folder {folder} cannot be listed"
            found.note("layout", root, what, "Make it readable")
    path, lists = _split_file(root, split), root / "ImageSets" / "Main"
    if os.path.isdir(lists) and not os.path.isfile(path):
        splits = sorted(path.stem for path in lists.glob("*.txt"))
        near = difflib.get_close_matches(split, splits, 1)
        fix = f"It has {', '.join(splits[:8]) or 'no split at all'}"
        fix += f"; the nearest is '{near[0]}'" if near else ""
        if split == "test" and "trainval" in splits:
            fix += ". The official VOC2007 test is a separate archive: unpack it into this folder"
        found.note("layout", path, f"there is no split '{split}'", fix)


def _split_file(root: Path, split: str, lists: str = "Main") -> Path:
    return root / "ImageSets" / lists / f"{split}.txt"


def read_split(root: Path, split: str, found: AnnotatedSet, lists: str = "Main") -> list[str]:
    """Read the image ids of a split; from a per-class list, those that show the class (not -1)."""
    path = _split_file(root, split, lists)
    try:
        ids = read_lines(path)
    except KsclError as error:
        found.note("split", path, error, "Check the path, or save it as UTF-8")
        return []
    rows = [line.split() for line in ids]
    per_class = bool(rows) and all(len(row) == 2 and row[1] in ("-1", "0", "1") for row in rows)
    if per_class and not os.path.exists(root / "Annotations" / f"{ids[0]}.xml"):
        ids = [row[0] for row in rows if row[1] != "-1"]
        what = f"is a list for one class: {len(ids)} of its {len(rows)} images hold it and are used"
        fix = "Name the split without the class to use all of them"
        found.note("per-class split", path, what, fix, fatal=False)
    if not ids:
        fix = "Write one image id per line, or name another split"
        found.note("empty split", path, "the split lists no image", fix)
    seen: dict[str, None] = {}
    for image_id in ids:
        if image_id in seen:
            what = f"'{image_id}' is listed twice"
            found.note("duplicate id", path, what, "Delete one of the lines")
        elif leads_out(image_id):
            what = f"'{image_id}' leads out of the data set"
            found.note("split", path, what, "Ids are file names without suffix")
        else:
            seen[image_id] = None
    return list(seen)


def _without_odd_ids(
    root: Path, split: str, ids: list[str], images: Images | None, found: AnnotatedSet
) -> list[str]:
    """Return the ids to read, and note one problem for all that name a file in a wrong way.

    Such an id names no file, and without its suffix or in another case it would.
    """
    folder = root / "Annotations"
    missing = [
        image_id
        for image_id in ids
        if not os.path.exists(folder / f"{image_id}.xml")
        or (images is not None and image_id not in images)
    ]
    if not missing:
        return ids
    names = {name.removesuffix(".xml") for name, _ in walk_files(str(folder), Walk())}
    alike: dict[str, set[str]] = {}
    for name in names | set(images or ()):
        alike.setdefault(name.casefold(), set()).add(name)
    odd = {}
    for image_id in missing:
        stem = image_id.rpartition(".")[0] if is_image(image_id) else image_id
        meant = alike.get(stem.casefold(), set()) - {image_id}
        if meant:
            odd[image_id] = min(meant)
    if odd:
        first, file = next(iter(odd.items()))
        what = f"{len(odd)} of {len(ids)} ids are not the names of their files without suffix"
        fix = "Name image, annotation and id alike, in upper and lower case too"
        what += f", such as '{first}' for '{file}'"
        found.note("odd ids", _split_file(root, split), what, fix)
    return [image_id for image_id in ids if image_id not in odd]


def image_files(folder: Path) -> Images:
    """List image files by the id they stand for: one walk instead of one guess per suffix."""
    index: Images = {}
    for name, _ in walk_files(str(folder), Walk()):
        if is_image(name):
            index.setdefault(name.rpartition(".")[0], []).append(folder / name)
    return index


class _Builder(TreeBuilder):
    """Refuse document types: entities could make a stranger's file grow, or read other files."""

    def doctype(self, name: str, *_: object) -> None:
        raise KsclError(f"declares the document type '{name}', which annotations do not need")


def parse_xml(path: Path) -> Element:
    """Return the root element; the message of the KsclError for a bad file is the reason alone."""
    try:
        return fromstring(read_file(path, MAX_BYTES), XMLParser(target=_Builder()))
    except OSError as error:
        raise KsclError(f"cannot be read: {error.strerror or error}") from error
    except KsclError:
        raise
    except (SyntaxError, LookupError, ValueError) as error:  # ParseError is a SyntaxError
        raise KsclError(f"is not well-formed XML: {error}") from error


Tags = list[tuple[str, "str | Tags"]]  # names, each with its text or the tags in it


def annotation_tags(
    file_name: str, size: tuple[int, int], objects: Iterable[AnnotatedObject]
) -> Tags:
    """Return the annotation of one image, as LabelImg writes it; boxes count from 1."""
    sides = zip(("width", "height", "depth"), map(str, (*size, 3)), strict=True)
    tags: Tags = [("filename", file_name), ("size", list(sides))]
    for thing in objects:
        x1, y1, x2, y2 = thing.box
        box = {"xmin": x1 + 1, "ymin": y1 + 1, "xmax": x2, "ymax": y2}
        content: Tags = [
            ("name", thing.name),
            ("pose", thing.pose),
            ("truncated", str(int(thing.truncated))),
            ("difficult", str(int(thing.difficult))),
            ("bndbox", [(tag, f"{round(number, 2):.12g}") for tag, number in box.items()]),
        ]
        tags.append(("object", content))
    return tags


def to_xml(tags: Tags) -> bytes:
    """Return the file of an annotation."""
    tree = _element("annotation", tags)
    indent(tree, "\t")
    return tostring(tree, encoding="utf-8") + b"\n"


def _element(name: str, content: str | Tags) -> Element:
    element = Element(name)
    if isinstance(content, str):
        element.text = content
    else:
        element.extend(_element(*each) for each in content)
    return element
