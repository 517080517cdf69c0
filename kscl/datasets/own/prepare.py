"""Prepare a user's own images: read, check, split, write; the user's files never change.

With annotations, the set is a VOC folder of links to the images. Images in one folder per class
become links in classes/train and classes/val, for a probe.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import indent, tostring

import numpy as np
from tabulate import tabulate

from kscl.data.annotated.voc import CLASSES_FILE, annotation_tree
from kscl.data.annotations import AnnotatedImage, Problem, list_files, list_problems
from kscl.data.formats import is_image
from kscl.datasets.own.read import OwnSet, check_images, read_own
from kscl.datasets.own.split import deal_groups, find_groups, parse_split
from kscl.datasets.own.tiles import OBJECTS_WIDE, TILES, object_side, write_tiles
from kscl.errors import KsclError
from kscl.runtime.files import whole_folder

MANIFEST, REPORT = "own.json", "report.txt"
TRAIN, TEST, PRETRAIN = "trainval", "test", "pretrain"
SIDES = ("train", "val")  # of class folders
CLASS_NAMES = "class names"  # the kind of problem that no image is to blame for
SHOWN = 5  # of odd files and near-duplicates
FEW_OBJECTS = 10  # to train on or to test on: fewer say little


@dataclass(frozen=True)
class Request:
    """What the user asks for."""

    images: Path
    annotations: Path | None  # None: the images are in one folder per class
    output_dir: Path
    split: str = "75/25"
    seed: int = 0
    format: str = ""  # "" is found out
    classes: tuple[str, ...] = ()
    merge_case: bool | None = None  # None: not decided, so names that differ by case are refused
    skip_bad: bool = False


def prepare_own(request: Request) -> str:
    """Write the set and return the report; one KsclError names all problems before it."""
    parse_split(request.split)
    for folder in filter(None, (request.images, request.annotations)):
        if request.output_dir.resolve().is_relative_to(folder.resolve()):
            raise KsclError(
                f"--output-dir {request.output_dir} lies in {folder}, whose files are read: the "
                "next start would take its links for more of your images. Choose a folder beside "
                "it."
            )
    if request.annotations is None:
        return _prepare_class_folders(request)
    return _prepare_annotated(request, request.annotations)


def _prepare_annotated(request: Request, annotations: Path) -> str:
    own = read_own(request.images, annotations, request.format, request.classes)
    _merge_case(own, request.merge_case)
    left_out = _leave_out(own, request.skip_bad)
    if not any(image.objects for image in own.images):
        raise KsclError(f"{annotations}: no image has an object. Check --annotations.")
    paths = [image.path for image in own.images if image.path is not None] + own.unlabeled
    ids = make_ids(paths, request.images)
    images = {ids[image.path]: image for image in own.images if image.path is not None}
    groups = find_groups(paths)
    splits = _split([[ids[paths[i]] for i in group] for group in groups], images, request)
    classes = sorted({thing.name for image in own.images for thing in image.objects})
    alike = [[paths[index].name for index in group] for group in groups if len(group) > 1]
    text = _report(own, images, splits, classes, left_out, alike)
    size = {ids[path]: path.stat().st_size for path in paths}
    lines = [f"{name} {size[name]} {image.objects}" for name, image in sorted(images.items())]
    lines += sorted(f"{ids[path]} {size[ids[path]]}" for path in own.unlabeled)
    about = {
        **_about(request, own.format, classes, lines),
        "annotations": str(annotations.resolve()),
        "left_out": left_out,
        "tiles": OBJECTS_WIDE,
    }
    if is_written(request.output_dir, about):
        return f"{text}\n{request.output_dir} is there already, made from the same files."
    with whole_folder(request.output_dir) as folder:
        _write_voc(folder, images, {ids[path]: path for path in own.unlabeled}, splits, classes)
        side = object_side([images[name] for name in splits[TRAIN]])
        pretrain = set(splits[PRETRAIN])
        photos = {ids[path]: path for path in paths if ids[path] in pretrain}
        tiles = write_tiles(folder / TILES, photos, side)
        if tiles:
            text += (
                f"\nTiles to pretrain on: {tiles:,}, about {OBJECTS_WIDE:g} objects wide, of the "
                f"{len(photos):,} images that are not to test on."
            )
        _write_about(folder, about, text)
    return text


def _merge_case(own: OwnSet, merge: bool | None) -> None:
    """Unite class names that differ only by case, or note them as problems."""

    def first_with(name: str) -> str:
        return next(i.annotation for i in own.images if name in {o.name for o in i.objects})

    counts = Counter(thing.name for image in own.images for thing in image.objects)
    new, problems = _unite_case(counts, merge, "object", first_with)
    own.problems += problems
    for index, image in enumerate(own.images):
        renamed = tuple(replace(o, name=new.get(o.name, o.name)) for o in image.objects)
        own.images[index] = replace(image, objects=renamed)


def _unite_case(
    counts: Counter[str], merge: bool | None, unit: str, first: Callable[[str], str]
) -> tuple[dict[str, str], list[Problem]]:
    """Return the new names of classes, and a problem for each name to decide on.

    `counts` are of `unit`, object or image; the most frequent spelling is kept. `first` returns
    where a name occurs.
    """
    spellings: dict[str, list[str]] = {}
    for name, _ in counts.most_common():
        spellings.setdefault(name.casefold(), []).append(name)
    several = [names for names in spellings.values() if len(names) > 1]
    if merge is not None:
        return ({name: names[0] for names in several for name in names} if merge else {}), []
    problems = []
    for names in several:
        what = " and ".join(
            f"'{n}' ({counts[n]} {unit}{'s' if counts[n] > 1 else ''}, first in {first(n)})"
            for n in names
        )
        fix = f"--merge-case makes them all '{names[0]}', --keep-case keeps them apart"
        problems.append(Problem(CLASS_NAMES, what, "differ only by case", fix))
    return {}, problems


def _refuse(fatal: Sequence[Problem], skip_bad: bool) -> None:
    """Raise KsclError with all problems, unless they are of images that may be left out."""
    of_images = [problem for problem in fatal if problem.kind != CLASS_NAMES]
    if len(of_images) == len(fatal) and (skip_bad or not fatal):
        return
    advice = ", or leave the images concerned out with --skip-bad." if of_images else "."
    raise KsclError(
        f"{len(fatal)} problem{'s' if len(fatal) > 1 else ''} found; nothing was written:\n"
        f"{list_problems(fatal)}\nFix them{advice}"
    )


def _leave_out(own: OwnSet, skip_bad: bool) -> list[str]:
    """Raise all fatal problems, or leave out the images and annotations that have one."""
    fatal = [problem for problem in own.problems if problem.fatal]
    _refuse(fatal, skip_bad)
    where = {problem.where for problem in fatal}
    per_file = Counter(image.annotation for image in own.images)
    shared = [p for p in fatal if per_file[p.where] > 1]  # a COCO file names no single image
    if shared:
        raise KsclError(
            f"--skip-bad cannot tell which images these are about:\n{list_problems(shared)}\n"
            "Correct the file."
        )
    bad = [i for i in own.images if i.annotation in where or str(i.path) in where]
    where |= {str(image.path) for image in bad}
    own.images = [image for image in own.images if str(image.path) not in where]
    own.unlabeled = [path for path in own.unlabeled if str(path) not in where]
    return sorted(where)


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
    """Return a name without blanks: after one, a split file may have a class's presence."""
    good = (c.isprintable() and not c.isspace() and c not in "/\\." for c in text)
    return "".join(c if keep else "_" for c, keep in zip(text, good, strict=True)) or "_"


def _split(
    groups: list[list[str]], images: dict[str, AnnotatedImage], request: Request
) -> dict[str, list[str]]:
    """Deal the annotated images out; the others are for pretraining, unless near a test image."""
    labeled = [group for group in groups if any(name in images for name in group)]
    contents = [
        [[o.name for o in images[name].objects] for name in group if name in images]
        for group in labeled
    ]
    sides = deal_groups(contents, parse_split(request.split), request.seed)
    if len(set(sides)) < 2:
        raise KsclError(
            "The images cannot be split: they are too few, or all nearly the same picture. Add "
            "images, or give the parts more alike with --split 50/50."
        )
    near_test = {n for group, side in zip(labeled, sides, strict=True) if side for n in group}
    every = sorted(name for group in groups for name in group)
    return {
        TRAIN: [name for name in every if name in images and name not in near_test],
        TEST: [name for name in every if name in images and name in near_test],
        PRETRAIN: [name for name in every if name not in near_test],
    }


def _report(
    own: OwnSet,
    images: Mapping[str, AnnotatedImage],
    splits: Mapping[str, Sequence[str]],
    classes: Sequence[str],
    left_out: Sequence[str],
    alike: Sequence[Sequence[str]],
) -> str:
    """Describe a prepared set to the person who brought it."""
    counts = {
        split: Counter(o.name for name in splits[split] for o in images[name].objects)
        for split in (TRAIN, TEST)
    }
    rows = []
    for name in classes:
        with_it = sum(any(o.name == name for o in i.objects) for i in images.values())
        numbers = [found[name] for found in counts.values()]
        rows.append([name, with_it, sum(numbers), *numbers])
    lines = [
        f"{len(own.files.images):,} images, {len(own.files.annotations):,} annotation files in the "
        f"format {own.format}.",
        tabulate(rows, ["class", "images", "objects", "to train on", "to test on"]),
        _box_sizes(own.images),
        f"Split: {len(splits[TRAIN])} images to train on, {len(splits[TEST])} to test on.",
    ]
    if alike:
        lines.append(
            f"Nearly the same picture, so kept on one side: {sum(map(len, alike))} images in "
            f"{len(alike)} group{'s' if len(alike) > 1 else ''}; one is "
            f"{', '.join(alike[0][:SHOWN])}."
        )
    if own.unlabeled:
        lines.append(f"Without annotation, used for pretraining only: {_listed(own.unlabeled)}.")
    for purpose, found in zip(("to train on", "to test on"), counts.values(), strict=True):
        absent = [name for name in classes if not found[name]]
        rare = [f"{name} ({found[name]})" for name in classes if 0 < found[name] < FEW_OBJECTS]
        if absent:
            lines.append(f"No object {purpose}: {', '.join(absent)}. Annotate more of them.")
        if rare:
            lines.append(f"Few objects {purpose}: {', '.join(rare)}. Their AP is mostly chance.")
    if own.odd:
        lines.append(f"Not used: {_listed(own.odd)}.")
    if left_out:
        lines.append(f"Left out because of problems (--skip-bad): {len(left_out)} files.")
        lines.append(list_problems(problem for problem in own.problems if problem.fatal))
    notes = [problem for problem in own.problems if not problem.fatal]
    if notes:
        lines.append(f"Notes:\n{list_problems(notes)}")
    return "\n".join(lines)


def _box_sizes(images: Sequence[AnnotatedImage]) -> str:
    """Return the middle and the spread of the boxes' sizes, absolute and relative."""
    boxes = np.array([thing.box for image in images for thing in image.objects])
    sides = np.sqrt((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]))
    shown = np.sqrt([i.width * i.height for i in images for _ in i.objects])
    low, middle, high = np.quantile(sides, [0.1, 0.5, 0.9])
    part = np.quantile(sides / shown, [0.1, 0.5, 0.9])
    return (
        f"Boxes: {len(boxes):,}; side (root of the area) {middle:.0f} pixels, 80% within "
        f"{low:.0f} to {high:.0f}; relative to the image {part[1]:.0%}, {part[0]:.0%} to "
        f"{part[2]:.0%}."
    )


def _listed(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(path.name for path in paths[:SHOWN]) + more


def _about(
    request: Request, kind: str, classes: Sequence[str], lines: Iterable[str]
) -> dict[str, Any]:
    """Return what the set is made from; `lines` describe the content of its files."""
    digest = hashlib.sha256("".join(f"{line}\n" for line in lines).encode())
    return {
        "images": str(request.images.resolve()),
        "format": kind,
        "split": request.split,
        "seed": request.seed,
        "classes": list(classes),
        "content": digest.hexdigest()[:16],
    }


def is_written(folder: Path, about: Mapping[str, Any]) -> bool:
    """Return whether the folder holds this very set; raise KsclError if it holds anything else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        before = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(before, dict):
            raise ValueError
    except (OSError, ValueError):
        raise KsclError(
            f"{folder} holds something that is not a set of this tool. Choose another --output-dir."
        ) from None
    changed = [key for key, value in about.items() if before.get(key) != value]
    if changed:
        raise KsclError(
            f"{folder} was made from other data or settings ({', '.join(changed)} differ). Delete "
            "it, or choose another --output-dir."
        )
    return True


def _write_about(folder: Path, about: Mapping[str, Any], report: str) -> None:
    (folder / MANIFEST).write_text(json.dumps(about, indent=1) + "\n", "utf-8")
    (folder / REPORT).write_text(f"{report}\n", "utf-8")


def _write_voc(
    folder: Path,
    images: Mapping[str, AnnotatedImage],
    unlabeled: Mapping[str, Path],
    splits: Mapping[str, Sequence[str]],
    class_names: Sequence[str],
) -> None:
    """Write annotations, links and lists; images are by id."""
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    lists = {f"ImageSets/Main/{split}.txt": ids for split, ids in splits.items()}
    for file, lines in {CLASSES_FILE: class_names, **lists}.items():
        (folder / file).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    paths = dict(unlabeled)
    for image_id, image in images.items():
        assert image.path is not None
        paths[image_id] = image.path
        size = image.width, image.height
        tree = annotation_tree(f"{image_id}{image.path.suffix}", size, image.objects)
        indent(tree, "\t")
        content = tostring(tree, encoding="utf-8") + b"\n"
        (folder / "Annotations" / f"{image_id}.xml").write_bytes(content)
    for image_id, path in paths.items():
        os.symlink(path.resolve(), folder / "JPEGImages" / f"{image_id}{path.suffix}")


def _prepare_class_folders(request: Request) -> str:
    """Write links to the images of every class."""
    images, output_dir = request.images, request.output_dir
    found = _by_class(images)
    counts = Counter({name: len(paths) for name, paths in found.items()})
    new, undecided = _unite_case(
        counts, request.merge_case, "image", lambda name: str(found[name][0])
    )
    label = {path: new.get(name, name) for name, paths in found.items() for path in paths}
    problems = check_images(dict.fromkeys(label))
    _refuse([*undecided, *problems], request.skip_bad)
    classes = sorted(set(label.values()))
    for problem in problems:
        del label[Path(problem.where)]
    paths = sorted(label)
    groups = find_groups(paths)
    contents = [[[label[paths[i]]] for i in group] for group in groups]
    sides = deal_groups(contents, parse_split(request.split), request.seed)
    side_of = {paths[i]: SIDES[s] for group, s in zip(groups, sides, strict=True) for i in group}
    dealt = Counter((label[path], side) for path, side in side_of.items())
    short = [name for name in classes if not all(dealt[name, side] for side in SIDES)]
    if short:
        raise KsclError(
            f"Class folders of {images} with too few different images for both sides of the split: "
            f"{', '.join(short)}. Add images, or remove the folders."
        )
    table = tabulate(
        [[name, *(dealt[name, side] for side in SIDES)] for name in classes], ["class", *SIDES]
    )
    text = f"{len(paths):,} images in {len(classes)} classes.\n{table}"
    if problems:
        text += f"\nLeft out because of problems (--skip-bad):\n{list_problems(problems)}"
    lines = [f"{label[path]} {path.name} {path.stat().st_size}" for path in paths]
    about = _about(request, "class folders", classes, lines)
    if is_written(output_dir, about):
        return f"{text}\n{output_dir} is there already, made from the same files."
    ids = make_ids(paths, images)
    with whole_folder(output_dir) as folder:
        for path, side in side_of.items():
            place = folder / "classes" / side / label[path] / f"{ids[path]}{path.suffix}"
            place.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(path.resolve(), place)
        _write_about(folder, about, text)
    return text


def _by_class(images: Path) -> dict[str, list[Path]]:
    if not images.is_dir():
        raise KsclError(f"{images} is not a folder. Check --images.")
    found: dict[str, list[Path]] = defaultdict(list)
    for name, path in list_files(images).items():
        if is_image(name):
            found[name.split("/", 1)[0] if "/" in name else ""].append(path)
    if "" in found or len(found) < 2:
        raise KsclError(
            f"{images} does not have one folder per class, with all images inside them. Give "
            "--annotations for boxes, or sort the images into folders; unlabeled images alone can "
            "be pretrained on (tools/pretrain.py) but not compared."
        )
    return found
