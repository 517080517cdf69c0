"""Pascal VOC: Annotations/*.xml, JPEGImages/*, ImageSets/Main/*.txt; or LabelImg's files alone.

Any class list will do. Tags that many tools leave out are read as pose "Unspecified", truncated 0
and difficult 0; a missing (or zero) <size> is taken from the image; coordinates may be fractions.
The reader never stops at a problem: it notes it and continues, so that all are reported at once.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, TreeBuilder
from xml.parsers import expat

from kscl.data.annotations import (
    DATASETS_VARIABLE,
    MAX_SIDE,
    AnnotatedImage,
    AnnotatedObject,
    AnnotatedSet,
    AnnotationFormat,
    Box,
    Files,
    Problem,
    Source,
    UnusableImage,
    annotation_format,
    check_box,
    check_class_names,
    class_problem,
    image_size,
    is_ordered,
    leads_out,
    one_line_per_class,
)
from kscl.data.formats import IMAGE_EXTENSIONS, is_image
from kscl.data.source import Walk, read_file, walk_files
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
MAX_DEPTH = 200  # elements within each other; annotations have five


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
                fix = "Write the annotation again, or remove the file"
                problem = Problem("unreadable annotation", str(path), str(error), fix)
                found.problems.append(problem)
        found.class_names = tuple(sorted({n for tree in trees.values() for n in _names_in(tree)}))
        for name, tree in trees.items():
            path = files.annotations[name]
            image = files.image_of(name, path, found.problems, [_text(tree, "filename")])
            if image is not None:
                found.images.append(_read_tree(tree, "", image, str(path), found))
        return found

    def source(self, first: str, last: str, root: Path = Path()) -> Source:
        return Source("", self.name, root / first, split=last)

    def read_set(
        self,
        source: Source,
        class_names: Sequence[str] | None,
        with_images: bool,
        with_masks: bool,
    ) -> AnnotatedSet:
        """Read one split; a public set has VOC's own classes unless others are given."""
        classes = class_names or (VOC_CLASSES if source.official else None)
        found = read_voc(
            source.root, source.split, classes, name=source.name, with_images=with_images
        )
        if source.official and not os.path.isdir(source.root):
            fix = _how_to_get(source)
            found.problems = [replace(problem, fix=fix) for problem in found.problems]
        return found

    def class_names(self, source: Source) -> tuple[str, ...]:
        """Return VOC's own classes for a public set, or else those of the folder."""
        if source.official:
            return VOC_CLASSES
        problems = check_layout(source.root, source.split)
        if problems:
            raise KsclError("\n".join(str(problem) for problem in problems))
        return found_class_names(source.root)

    def has_class_list(self, source: Source) -> bool:
        """Return whether there is a list, not just names in XML files."""
        return source.official or os.path.isfile(source.root / CLASSES_FILE)


def _how_to_get(source: Source) -> str:
    """Return what to do if a year of Pascal VOC is not below $DETECTRON2_DATASETS."""
    now = os.getenv(DATASETS_VARIABLE)
    is_now = f"now {now}" if now else "not set, so ./datasets is used"
    return (
        f"Run python tools/prepare_data.py voc --root {source.root.parent} to download it; if you "
        f"have it, set {DATASETS_VARIABLE} to the folder that holds {source.root.name} ({is_now})"
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
        found.images += _read_image(root, image_id, images, found)
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


def _read_image(
    root: Path, image_id: str, images: dict[str, list[Path]] | None, found: AnnotatedSet
) -> list[AnnotatedImage]:
    path = root / "Annotations" / f"{image_id}.xml"
    image = None if images is None else _choose_image(root, image_id, images, found.problems)
    if not os.path.exists(path):
        fix = "Add it (without <object> if the image shows none), or remove the id from the split"
        what = "there is no such file"
        found.problems.append(Problem("missing annotation", str(path), what, fix))
        return []
    try:
        tree = parse_xml(path)
    except KsclError as error:
        fix = "Write the annotation again, or remove the id from the split"
        found.problems.append(Problem("unreadable annotation", str(path), str(error), fix))
        return []
    if images is not None and image is None:
        return []
    return [_read_tree(tree, image_id, image, str(path), found)]


def _read_tree(
    tree: Element, image_id: str, image_path: Path | None, where: str, found: AnnotatedSet
) -> AnnotatedImage:
    """Return what one annotation says about its image; note every problem."""
    problems = found.problems
    width, height = _size(tree, image_path, where, problems)
    objects = []
    for number, item in enumerate(tree.findall("object"), 1):
        thing = _read_object(item, f"object {number}", found.class_names, where, problems)
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
        fix = "Add the image, or remove the id from the split"
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
    except UnusableImage as error:
        fix = f"{error.fix}, or remove the id from the split"
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


def check_layout(root: Path, split: str, with_images: bool = True) -> list[Problem]:
    """Look for the folders and the split file without which nothing else makes sense."""
    if not os.path.isdir(root):
        return [Problem("layout", str(root), "there is no such folder", "Check the path")]
    inner = sorted(path.parent for path in root.glob("*/ImageSets"))
    wanted = ["Annotations", "ImageSets/Main", *(["JPEGImages"] if with_images else [])]
    problems = []
    for folder in wanted:
        if not os.path.isdir(root / folder):
            hint = f"Perhaps you mean {inner[0]}" if inner else "Arrange the set as Pascal VOC is"
            problems.append(Problem("layout", str(root), f"it has no folder {folder}", hint))
        elif not os.access(root / folder, os.R_OK | os.X_OK):
            what = f"its folder {folder} cannot be listed"
            problems.append(Problem("layout", str(root), what, "Make it readable"))
    lists = root / "ImageSets" / "Main"
    if os.path.isdir(lists) and not os.path.isfile(lists / f"{split}.txt"):
        splits = sorted(path.stem for path in lists.glob("*.txt"))
        near = difflib.get_close_matches(split, splits, 1)
        fix = f"It has {', '.join(splits[:8]) or 'no split at all'}"
        fix += f"; the nearest is '{near[0]}'" if near else ""
        if split == "test" and "trainval" in splits:
            fix += (
                ". The official VOC2007 test is a separate archive: unpack it into the same folder"
            )
        where = str(lists / f"{split}.txt")
        problems.append(Problem("layout", where, f"there is no split '{split}'", fix))
    return problems


def read_split(root: Path, split: str) -> tuple[list[str], list[Problem]]:
    """Read the image ids of a split; of a per-class list those that hold the class (not -1)."""
    path = root / "ImageSets" / "Main" / f"{split}.txt"
    problems: list[Problem] = []
    try:
        text = read_file(path).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "") or error
        fix = "Check the path" if isinstance(error, OSError) else "Save it as UTF-8"
        return [], [Problem("split", str(path), f"it cannot be read: {reason}", fix)]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    rows = [line.split() for line in lines]
    per_class = bool(rows) and all(len(row) == 2 and row[1] in ("-1", "0", "1") for row in rows)
    if per_class and not os.path.exists(root / "Annotations" / f"{lines[0]}.xml"):
        ids = [row[0] for row in rows if row[1] != "-1"]
        what = f"is a list for one class: {len(ids)} of its {len(rows)} images hold it and are used"
        fix = "Name the split without the class to use all of them"
        problems.append(Problem("per-class split", str(path), what, fix, fatal=False))
    else:
        ids = lines
    if not ids:
        fix = "Write one image id per line, or name another split"
        problems.append(Problem("empty split", str(path), "the split lists no image", fix))
    seen: dict[str, None] = {}
    for image_id in ids:
        if image_id in seen:
            what = f"'{image_id}' is listed twice"
            problems.append(Problem("duplicate id", str(path), what, "Delete one of the lines"))
        elif leads_out(image_id):
            what = f"'{image_id}' leads out of the data set"
            problems.append(Problem("split", str(path), what, "Ids are file names without suffix"))
        else:
            seen[image_id] = None
    return list(seen), problems


def take_out_odd_ids(
    root: Path, split: str, ids: list[str], images: dict[str, list[Path]] | None
) -> tuple[list[str], list[Problem]]:
    """Return the ids to read, and one problem for all with a suffix and one for all in other case.

    An id is odd if it names no file, and without its suffix or in another case it would.
    """
    annotations = root / "Annotations"
    missing = [
        image_id
        for image_id in ids
        if not os.path.exists(annotations / f"{image_id}.xml")
        or (images is not None and image_id not in images)
    ]
    if not missing:
        return ids, []
    names = {name.removesuffix(".xml") for name, _ in walk_files(str(annotations), Walk())}
    alike: dict[str, list[str]] = {}
    for name in sorted(names | set(images or ())):
        alike.setdefault(name.casefold(), []).append(name)
    suffixed = {i: i.rpartition(".")[0] for i in missing if is_image(i)}
    suffixed = {i: stem for i, stem in suffixed.items() if stem in names}
    others = (i for i in missing if i not in suffixed)
    in_case = {i: o for i in others for o in alike.get(i.casefold(), ()) if o != i}
    where = str(root / "ImageSets" / "Main" / f"{split}.txt")
    problems = []
    if suffixed:
        what = f"{len(suffixed)} of {len(ids)} ids have a suffix, such as '{next(iter(suffixed))}'"
        fix = "Ids have no suffix: take it off every line"
        problems.append(Problem("suffix of ids", where, what, fix))
    if in_case:
        first, file = next(iter(in_case.items()))
        what = f"{len(in_case)} of {len(ids)} ids differ from their files in upper and lower case"
        what += f", such as '{first}' from '{file}'"
        fix = "Name image, annotation and id alike"
        problems.append(Problem("case of ids", where, what, fix))
    return [i for i in ids if i not in suffixed and i not in in_case], problems


def image_files(folder: Path) -> dict[str, list[Path]]:
    """List image files by the id they stand for: one walk instead of one guess per suffix."""
    index: dict[str, list[Path]] = {}
    for name, _ in walk_files(str(folder), Walk()):
        if is_image(name):
            index.setdefault(name.rpartition(".")[0], []).append(folder / name)
    return index


def parse_xml(path: Path) -> Element:
    """Return the root element; the message of the KsclError for a bad file is the reason alone.

    Entities are refused, so that a file from a stranger can neither grow nor read others.
    """
    try:
        content = read_file(path, MAX_BYTES)
    except OSError as error:
        raise KsclError(f"cannot be read: {error.strerror or error}") from error
    builder = TreeBuilder()
    depth = 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > MAX_DEPTH:
            raise KsclError(f"has elements nested more than {MAX_DEPTH} deep")
        builder.start(tag, attributes)

    def end(tag: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(tag)

    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.EntityDeclHandler = _refuse_entity
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = builder.data
    try:
        parser.Parse(content, True)
        return builder.close()
    except (expat.ExpatError, LookupError, ValueError, AssertionError) as error:
        if isinstance(error, KsclError):
            raise
        raise KsclError(f"is not well-formed XML: {error}") from error


def _refuse_entity(name: str, *_: object) -> None:
    raise KsclError(f"declares the entity '{name}', which annotations do not need")


def annotation_tree(
    file_name: str, size: tuple[int, int], objects: Iterable[AnnotatedObject]
) -> Element:
    """Return the annotation of one image, as LabelImg writes it; boxes count from 1."""
    top = Element("annotation")
    SubElement(top, "filename").text = file_name
    sides = SubElement(top, "size")
    for tag, value in zip(("width", "height", "depth"), (*size, 3), strict=True):
        SubElement(sides, tag).text = str(value)
    for thing in objects:
        item = SubElement(top, "object")
        for tag, text in (
            ("name", thing.name),
            ("pose", thing.pose),
            ("truncated", str(int(thing.truncated))),
            ("difficult", str(int(thing.difficult))),
        ):
            SubElement(item, tag).text = text
        box = SubElement(item, "bndbox")
        x1, y1, x2, y2 = thing.box
        for tag, number in (("xmin", x1 + 1), ("ymin", y1 + 1), ("xmax", x2), ("ymax", y2)):
            SubElement(box, tag).text = f"{round(number, 2):.12g}"
    return top
