"""Which files a user's folders hold, in which format they are, and which belong together."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from kscl.data.annotated.coco import load_json, read_json
from kscl.data.annotated.yolo import NAME_FILES, YAML_FILES, looks_like_labels
from kscl.data.formats import is_image
from kscl.data.walk import Walk, walk_files
from kscl.errors import KsclError

FORMATS = ("voc", "coco", "yolo")
SHOWN = 3  # reasons why files are no annotations
SUFFIXES = {".xml": "voc", ".json": "coco", ".txt": "yolo"}


@dataclass
class Found:
    """The files of two folders, by what they are."""

    images: dict[str, Path] = field(default_factory=dict)  # by path below the folder
    annotations: dict[str, Path] = field(default_factory=dict)
    format: str = ""
    odd: list[Path] = field(default_factory=list)  # of no known use


def find_files(images: Path, annotations: Path, wanted: str = "") -> Found:
    """List images and annotations; raise KsclError if the format is not clear."""
    found = Found()
    for name, path in _files(images):
        if is_image(name):
            found.images[name] = path
        elif path.suffix.lower() not in SUFFIXES:
            found.odd.append(path)
    if not found.images:
        raise KsclError(f"{images} holds no image. Check --images.")
    by_format: dict[str, dict[str, Path]] = defaultdict(dict)
    damaged: dict[str, dict[str, Path]] = defaultdict(dict)
    reasons, others = [], []
    stems = {PurePosixPath(name).stem for name in found.images}
    for name, path in _files(annotations):
        kind = SUFFIXES.get(path.suffix.lower(), "")
        reason = _not_of(kind, path)
        if kind and not reason:
            by_format[kind][name] = path
            continue
        if kind:
            reasons.append(f"{path.name} {reason}")
        if _is_damaged(kind, path, stems):
            damaged[kind][name] = path
        elif not is_image(name) and path not in found.odd:
            others.append(path)
    kinds = [kind for kind in FORMATS if by_format[kind] or (kind == wanted and damaged[kind])]
    if not kinds or (wanted and wanted not in kinds):
        raise KsclError(
            f"{annotations} holds no annotations{f' in the format {wanted}' if wanted else ''}: "
            "neither LabelImg's or VOC's .xml, nor a COCO .json, nor YOLO's .txt files. "
            f"{''.join(f'{reason}. ' for reason in reasons[:SHOWN])}Check --annotations."
        )
    if len(kinds) > 1 and not wanted:
        counts = ", ".join(f"{len(by_format[kind])} of {kind}" for kind in kinds)
        raise KsclError(
            f"{annotations} holds annotations in several formats ({counts}). Choose one with "
            f"--format {kinds[0]}."
        )
    found.format = wanted or kinds[0]
    # What is damaged is told with the other problems, or else its images would be unlabeled.
    found.annotations = by_format[found.format] | damaged.pop(found.format, {})
    others += [path for files in damaged.values() for path in files.values()]
    if found.format == "yolo":  # these say what its numbers mean
        others = [path for path in others if path.name not in (*NAME_FILES, *YAML_FILES)]
    found.odd += others
    return found


def _not_of(kind: str, path: Path) -> str:
    """Return why a file is not an annotation of a format, or nothing if it is one."""
    if kind == "coco":
        try:
            load_json(path)
        except KsclError as error:
            return str(error)
    if kind == "yolo" and not looks_like_labels(path):
        return "does not begin with a class number and coordinates"
    return ""


def _is_damaged(kind: str, path: Path, stems: set[str]) -> bool:
    """Return whether a file that is no annotation was meant to be one."""
    if kind == "coco":
        try:
            read_json(path)
        except KsclError:
            return True
    return kind == "yolo" and path.stem in stems


def _files(root: Path) -> list[tuple[str, Path]]:
    if root.is_file():
        return [(root.name, root)]
    if not root.is_dir():
        raise KsclError(f"{root} is not there. Check the path.")
    met = Walk()
    return sorted((name, Path(entry.path)) for name, entry in walk_files(str(root), met))


class Images:
    """Images by the names under which annotations may know them."""

    def __init__(self, images: dict[str, Path]) -> None:
        self._by_key: dict[str, set[Path]] = defaultdict(set)
        for name, path in images.items():
            pure = PurePosixPath(name)
            for key in (str(pure), str(pure.with_suffix("")), pure.name, pure.stem):
                self._by_key[key].add(path)
        whole = set(self._by_key)
        for name, path in images.items():
            folders = PurePosixPath(name).parts[1:-1]
            for start in range(len(folders)):  # the annotations may begin further down
                end = PurePosixPath(*folders[start:], PurePosixPath(name).name)
                for key in {str(end), str(end.with_suffix(""))} - whole:
                    self._by_key[key].add(path)

    def belonging_to(self, names: Iterable[str]) -> Path | None:
        """Return the image of the first name that is known; raise KsclError if several have it."""
        for name in names:
            paths = self._by_key.get(name.replace("\\", "/").removeprefix("./"), set())
            if len(paths) == 1:
                return next(iter(paths))
            if paths:
                listed = ", ".join(sorted(map(str, paths))[:4])
                raise KsclError(f"it could belong to any of {listed}")
        return None


def make_ids(paths: Iterable[Path], root: Path) -> dict[Path, str]:
    """Name every image: by its file if that is unique, else by its path; no blanks, no suffix."""
    names = {path: _plain(path.stem) for path in paths}
    repeated = {name for name, count in Counter(names.values()).items() if count > 1}
    names |= {p: _plain(os.path.relpath(p, root)) for p in names if names[p] in repeated}
    taken: set[str] = set()
    for path in sorted(names):
        base, number = names[path], 2
        while names[path] in taken:
            names[path], number = f"{base}_{number}", number + 1
        taken.add(names[path])
    return names


def _plain(text: str) -> str:
    """Return a name without blanks: behind one, a split file may have a class's presence."""
    good = (c.isprintable() and not c.isspace() and c not in "/\\." for c in text)
    return "".join(c if keep else "_" for c, keep in zip(text, good, strict=True)) or "_"
