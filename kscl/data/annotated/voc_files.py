"""The files of a folder in the layout of Pascal VOC: which must be there, splits, images."""

from __future__ import annotations

import difflib
import os
from pathlib import Path, PurePosixPath

from kscl.data.annotated.annotations import Problem
from kscl.data.formats import is_image
from kscl.data.source import read_file
from kscl.data.walk import Walk, walk_files


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


def leads_out(name: str) -> bool:
    """Return whether a relative name from a file would reach beyond the data set's folder."""
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or "\0" in name


def image_files(folder: Path) -> dict[str, list[Path]]:
    """List image files by the id they stand for: one walk instead of one guess per suffix."""
    index: dict[str, list[Path]] = {}
    for name, _ in walk_files(str(folder), Walk()):
        if is_image(name):
            index.setdefault(name.rpartition(".")[0], []).append(folder / name)
    return index
