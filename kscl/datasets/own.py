"""Prepare a user's own images: read, check, split, write. The user's files never change.

With annotations, the set is a VOC folder of links to the images. Class folders become links in
classes/train and classes/val, for a probe.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import cv2
import numpy as np
from scipy.sparse import csr_array, vstack
from scipy.sparse.csgraph import connected_components
from tabulate import tabulate

from kscl.data.annotated.voc import CLASSES_FILE, annotation_tags, to_xml
from kscl.data.annotations import (
    ANNOTATION_FORMATS,
    AnnotatedImage,
    AnnotatedObject,
    Files,
    Problem,
    image_problem,
    list_files,
    list_problems,
    read_files,
)
from kscl.data.formats import is_image
from kscl.data.source import in_threads, read_image
from kscl.errors import KsclError
from kscl.runtime.files import whole_folder

MANIFEST, REPORT = "own.json", "report.txt"
TRAIN, TEST, PRETRAIN = "trainval", "test", "pretrain"
SIDES = ("train", "val")  # of class folders
CLASS_FOLDERS = "class folders"  # in place of an annotation format
CLASS_NAMES = "class names"  # a kind of problem that does not belong to an image
SHOWN = 5  # odd files and near-duplicates
REASONS_SHOWN = 3  # why files are not annotations
FEW_OBJECTS = 10  # of a class in a split: AP means little below


@dataclass(frozen=True)
class Request:
    """The arguments of `kscl prepare own`."""

    images: Path
    annotations: Path | None  # None: one folder per class
    output_dir: Path
    split: str  # such as 75/25
    seed: int
    format: str  # "": detect
    classes: Sequence[str]  # for formats that have only numbers
    merge_case: bool | None  # None: refuse names that differ only by case
    skip_bad: bool


@dataclass
class OwnSet:
    """Labeled and unlabeled images, and all problems; then how they are named and split."""

    format: str  # of the annotations, or CLASS_FOLDERS
    images: dict[Path, AnnotatedImage]
    problems: list[Problem]
    unlabeled: list[Path] = field(default_factory=list)
    odd: list[Path] = field(default_factory=list)  # not used
    num_files: tuple[int, int] = (0, 0)  # images and annotations
    left_out: list[str] = field(default_factory=list)
    ids: dict[Path, str] = field(default_factory=dict)
    groups: list[list[Path]] = field(default_factory=list)  # of near-duplicates
    splits: dict[str, list[Path]] = field(default_factory=dict)  # in the order of ids

    def class_names(self) -> list[str]:
        """Return the classes of all objects in alphabetical order."""
        return sorted({thing.name for image in self.images.values() for thing in image.objects})


def prepare_own(request: Request) -> str:
    """Write the set and return the report; raise one KsclError with all problems before that."""
    fractions = parse_split(request.split)
    for folder in filter(None, (request.images, request.annotations)):
        if request.output_dir.resolve().is_relative_to(folder.resolve()):
            raise KsclError(
                f"--output-dir {request.output_dir} is inside {folder}, so the next start would "
                "read its links as more of your images. Choose a folder beside it."
            )
    annotations = request.annotations
    if annotations is None:
        own = _read_class_folders(request.images)
    else:
        own = _read_annotated(request, annotations)
    _merge_case(own, request.merge_case)
    every_class = own.class_names()
    _leave_out(own, request.skip_bad)
    if not own.class_names():
        where = annotations or request.images
        raise KsclError(f"{where}: no usable image has an object. Check the path and the files.")
    paths = [*own.images, *own.unlabeled]
    own.ids = make_ids(paths, request.images)
    own.groups = [[paths[index] for index in group] for group in find_groups(paths)]
    own.splits = _split(own, fractions, request.seed)
    if annotations is None:
        return _write_class_folders(request, own, every_class)
    return _write_annotated(request, annotations, own)


def _write_annotated(request: Request, annotations: Path, own: OwnSet) -> str:
    ids, images, classes = own.ids, own.images, own.class_names()
    size = {path: path.stat().st_size for path in ids}
    labeled = sorted(images, key=lambda path: ids[path])
    lines = [f"{ids[path]} {size[path]} {images[path].objects}" for path in labeled]
    lines += sorted(f"{ids[path]} {size[path]}" for path in own.unlabeled)
    about = {
        **_about(request, own.format, classes, lines),
        "annotations": str(annotations.resolve()),
        "left_out": own.left_out,
        "tiles": OBJECTS_WIDE,
    }

    def write(folder: Path) -> str:
        lists = {CLASSES_FILE: classes}
        for split, paths in own.splits.items():
            lists[f"ImageSets/Main/{split}.txt"] = [ids[path] for path in paths]
        for file, lines in lists.items():
            _place(folder / file).write_text("".join(f"{line}\n" for line in lines), "utf-8")
        for path, name in ids.items():
            link = f"{name}{path.suffix}"
            os.symlink(path.resolve(), _place(folder / "JPEGImages" / link))
            if image := images.get(path):
                xml = to_xml(annotation_tags(link, (image.width, image.height), image.objects))
                _place(folder / "Annotations" / f"{name}.xml").write_bytes(xml)
        photos = {ids[path]: path for path in own.splits[PRETRAIN]}
        side = object_side([images[path] for path in own.splits[TRAIN]])
        tiles = write_tiles(folder / TILES, photos, side)
        about_tiles = (
            f"\nTiles to pretrain on: {tiles:,}, about {OBJECTS_WIDE:g} objects wide, from the "
            f"{len(photos):,} images outside the test split."
        )
        return about_tiles if tiles else ""

    return _write_once(request.output_dir, about, _report(own), write)


def _write_class_folders(request: Request, own: OwnSet, classes: list[str]) -> str:
    """Write links to the images of every class."""
    label = {path: image.objects[0].name for path, image in own.images.items()}
    side_of = dict.fromkeys(own.splits[TRAIN], SIDES[0]) | dict.fromkeys(own.splits[TEST], SIDES[1])
    dealt = Counter((label[path], side) for path, side in side_of.items())
    short = [name for name in classes if not all(dealt[name, side] for side in SIDES)]
    if short:
        raise KsclError(
            f"Class folders of {request.images} with too few different images for both splits: "
            f"{', '.join(short)}. Add images, or remove the folders."
        )
    rows = [[name, *(dealt[name, side] for side in SIDES)] for name in classes]
    text = f"{len(label):,} images in {len(classes)} classes.\n{tabulate(rows, ['class', *SIDES])}"
    if own.left_out:
        text += f"\nLeft out because of problems (--skip-bad):\n{list_problems(own.problems)}"
    lines = [f"{label[path]} {path.name} {path.stat().st_size}" for path in label]

    def write(folder: Path) -> str:
        for path, side in side_of.items():
            place = folder / "classes" / side / label[path] / f"{own.ids[path]}{path.suffix}"
            os.symlink(path.resolve(), _place(place))
        return ""

    about = _about(request, own.format, classes, lines)
    return _write_once(request.output_dir, about, text, write)


def _place(path: Path) -> Path:
    """Return the path after making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _read_class_folders(folder: Path) -> OwnSet:
    """Read images in one folder per class: each shows one object of its class, without a box."""
    if not folder.is_dir():
        raise KsclError(f"{folder} is not a folder. Check --images.")
    files = {path: name for name, path in list_files(folder).items() if is_image(name)}
    label = {path: os.path.dirname(files[path]).split("/")[0] for path in sorted(files)}
    if "" in label.values() or len(set(label.values())) < 2:
        raise KsclError(
            f"{folder} must have one folder per class, with all images inside them. Sort the "
            "images, or give --annotations for boxes. To pretrain on unlabeled images use kscl "
            "pretrain."
        )
    images = {
        path: AnnotatedImage("", path, 0, 0, (AnnotatedObject(name, (0, 0, 0, 0)),), str(path))
        for path, name in label.items()
    }
    return OwnSet(CLASS_FOLDERS, images, check_images(dict.fromkeys(images)))


def _read_annotated(request: Request, annotations: Path) -> OwnSet:
    """Read all annotations and decode all images."""
    kind, files, odd = _find_files(request.images, annotations, request.format)
    files.classes = tuple(request.classes)
    found = read_files(ANNOTATION_FORMATS[kind], files)
    images = {image.path: image for image in found.images if image.path is not None}
    reported = {problem.where for problem in found.problems}
    others = [path for path in files.images.values() if path not in images]
    unlabeled = [path for path in others if str(path) not in reported]
    sizes = {path: (image.width, image.height) for path, image in images.items()}
    problems = check_images(sizes | dict.fromkeys(unlabeled))
    found.problems += [problem for problem in problems if problem.where not in reported]
    num_files = len(files.images), len(files.annotations)
    return OwnSet(kind, images, found.problems, unlabeled, odd, num_files)


def _find_files(images: Path, annotations: Path, wanted: str) -> tuple[str, Files, list[Path]]:
    """Return the format, its files, and others; raise KsclError if the format is not clear."""
    formats = ANNOTATION_FORMATS
    suffixes = tuple(each.suffix for each in formats.values())
    others = {n: p for n, p in list_files(images).items() if not n.lower().endswith(suffixes)}
    pictures = {name: path for name, path in others.items() if is_image(name)}
    if not pictures:
        raise KsclError(f"{images} holds no image. Check --images.")
    good: dict[str, dict[str, Path]] = defaultdict(dict)  # files by format
    damaged: dict[str, dict[str, Path]] = defaultdict(dict)
    reasons = []
    stems = {PurePosixPath(name).stem for name in pictures}
    labels = {
        name: path
        for name, path in list_files(annotations).items()
        if name.lower().endswith(suffixes) or not is_image(name)
    }
    for name, path in labels.items():
        for each in formats.values():
            if not name.lower().endswith(each.suffix):
                continue
            refusal = each.refusal(path, stems)
            if refusal is None:
                good[each.name][name] = path
                continue
            reasons.append(f"{path.name} {refusal.reason}. ")
            if refusal.damaged:
                damaged[each.name][name] = path
    kinds = [kind for kind in formats if good[kind] or (kind == wanted and damaged[kind])]
    if not kinds or (wanted and wanted not in kinds):
        expected = formats[wanted].files if wanted else ", ".join(f.files for f in formats.values())
        raise KsclError(
            f"{annotations} holds no annotations: expected {expected}. "
            f"{''.join(reasons[:REASONS_SHOWN])}Check --annotations."
        )
    if len(kinds) > 1 and not wanted:
        counts = ", ".join(f"{len(good[kind])} of {kind}" for kind in kinds)
        raise KsclError(
            f"{annotations} holds annotations in several formats ({counts}). Choose one with "
            f"--format {kinds[0]}."
        )
    kind = wanted or kinds[0]
    # Damaged files become problems; ignored, their images would count as unlabeled.
    used = good[kind] | damaged[kind]
    companions = formats[kind].companions
    odd = [path for name, path in others.items() if name not in pictures]
    odd += [p for n, p in labels.items() if n not in used and p.name not in companions]
    return kind, Files(images, pictures, annotations, used), list(dict.fromkeys(odd))


def check_images(sizes: Mapping[Path, tuple[int, int] | None]) -> list[Problem]:
    """Decode images, and compare their sizes with the annotated ones where there are any."""
    return [p for p in in_threads(image_problem, sizes, sizes.values()) if p is not None]


def _merge_case(own: OwnSet, merge: bool | None) -> None:
    """Merge class names that differ only by case, or note them as problems.

    The most frequent spelling wins.
    """
    counts = Counter(thing.name for image in own.images.values() for thing in image.objects)
    spellings: dict[str, list[str]] = defaultdict(list)
    for name, _ in counts.most_common():
        spellings[name.casefold()].append(name)
    several = [names for names in spellings.values() if len(names) > 1]
    if merge:
        new = {name: names[0] for names in several for name in names}
        for path, image in own.images.items():
            renamed = tuple(replace(o, name=new.get(o.name, o.name)) for o in image.objects)
            own.images[path] = replace(image, objects=renamed)
    elif merge is None:
        first: dict[str, str] = {}
        for image in own.images.values():
            for thing in image.objects:
                first.setdefault(thing.name, image.annotation)
        unit = "image" if own.format == CLASS_FOLDERS else "object"
        for names in several:
            what = " and ".join(
                f"'{n}' ({counts[n]} {unit}{'s' if counts[n] > 1 else ''}, first in {first[n]})"
                for n in names
            )
            fix = f"--merge-case makes them all '{names[0]}', --keep-case keeps them apart"
            own.problems.append(Problem(CLASS_NAMES, what, "differ only by case", fix))


def _leave_out(own: OwnSet, skip_bad: bool) -> None:
    """Raise all fatal problems, or leave out the images and annotations that have one."""
    fatal = [problem for problem in own.problems if problem.fatal]
    of_images = [problem for problem in fatal if problem.kind != CLASS_NAMES]
    if len(of_images) < len(fatal) or (fatal and not skip_bad):
        advice = ", or leave out these images with --skip-bad." if of_images else "."
        raise KsclError(
            f"{len(fatal)} problem{'s' if len(fatal) > 1 else ''} found; nothing was written:\n"
            f"{list_problems(fatal)}\nFix them{advice}"
        )
    where = {problem.where for problem in fatal}
    per_file = Counter(image.annotation for image in own.images.values())
    shared = [p for p in fatal if per_file[p.where] > 1]  # a COCO file names no single image
    if shared:
        raise KsclError(
            f"--skip-bad cannot tell which images have these problems:\n{list_problems(shared)}\n"
            "Correct the file."
        )
    where |= {str(path) for path, image in own.images.items() if image.annotation in where}
    own.images = {path: image for path, image in own.images.items() if str(path) not in where}
    own.unlabeled = [path for path in own.unlabeled if str(path) not in where]
    own.left_out = sorted(where)


def make_ids(paths: Iterable[Path], root: Path) -> dict[Path, str]:
    """Name every image by its file if that is unique, else by its path; no blanks, no suffix."""
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
    """Replace blanks and dots: in a split file, a class's presence may follow a blank."""
    good = (c.isprintable() and not c.isspace() and c not in "/\\." for c in text)
    return "".join(c if keep else "_" for c, keep in zip(text, good, strict=True)) or "_"


# Splitting: near-duplicates stay in one split, and every class is in both in proportion

SIDE = 64  # pixels to which a picture is reduced before hashing
FREQUENCIES = 16  # per direction
# Fraction of the bits in which near-duplicates may differ. On 364 photos of one microscope, saving
# again, halving or brightening a photo changes up to 3% of the bits and a shift by 5 pixels up to
# 13%; the nearest other photo differs in 35% or more, except one real pair (9%).
SAME = 0.2
ROWS = 1024  # compared at a time


def find_groups(paths: Sequence[Path]) -> list[list[int]]:
    """Return groups of indices of near-duplicates; a unique picture is a group of one."""
    hashes = np.stack(in_threads(lambda path: picture_hash(read_image(path)), paths))
    least = hashes.shape[1] * (1 - 2 * SAME)  # product of two rows: equal minus unequal values
    starts = range(0, len(hashes), ROWS)
    close = vstack([csr_array(hashes[at : at + ROWS] @ hashes.T >= least) for at in starts])
    groups: dict[int, list[int]] = defaultdict(list)
    for index, group in enumerate(connected_components(close, directed=False)[1]):
        groups[group].append(index)
    return list(groups.values())


def picture_hash(picture: np.ndarray) -> np.ndarray:
    """Return the signs of the low frequencies of an RGB picture: 255 values of +1 or -1."""
    gray = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
    small = cv2.resize(gray, (SIDE, SIDE), interpolation=cv2.INTER_AREA).astype(np.float32)
    waves = cv2.dct(small)[:FREQUENCIES, :FREQUENCIES].ravel()[1:]  # without the mean
    return np.where(waves > np.median(waves), 1, -1).astype(np.float32)


def parse_split(text: str) -> tuple[float, float]:
    """Return the two fractions of `75/25`."""
    try:
        train, test = (float(part) for part in text.split("/"))
        if min(train, test) <= 0 or abs(train + test - 100) > 1e-6:
            raise ValueError
    except ValueError:
        raise KsclError(
            f"--split must be two positive percentages that add up to 100, got {text}. Write 75/25 "
            "for three quarters to train on and one quarter to test on."
        ) from None
    return train / 100, test / 100


def deal_groups(
    groups: Sequence[Sequence[Sequence[Hashable]]], fractions: tuple[float, float], seed: int
) -> list[int]:
    """Return the side, 0 or 1, of every group: a list of images, each a list of classes.

    Iterative stratification (Sechidis et al., 2011) over groups instead of images: deal out the
    class with the fewest groups left first, each group to the side that lacks most of the class.
    An image without objects has the class "".
    """
    contents = [Counter(name for image in group for name in set(image) or {""}) for group in groups]
    total: Counter[Hashable] = sum(contents, Counter())
    wanted = [{name: part * count for name, count in total.items()} for part in fractions]
    room = [part * sum(map(len, groups)) for part in fractions]
    has: list[Counter[Hashable]] = [Counter(), Counter()]
    sides: dict[int, int] = {}
    order = list(range(len(groups)))
    random.Random(seed).shuffle(order)
    order.sort(key=lambda index: -len(groups[index]))  # large groups are the hardest to place

    while len(sides) < len(groups):
        left = [index for index in order if index not in sides]
        counts = Counter(name for index in left for name in contents[index])
        rarest = min(counts, key=lambda name: (counts[name], str(name)))
        waiting = [index for index in left if rarest in contents[index]]
        for position, index in enumerate(waiting):
            without = [side for side in (0, 1) if not has[side][rarest]]
            must = without if len(waiting) - position <= len(without) else [0, 1]
            side = max(must, key=lambda s: (round(wanted[s][rarest], 9), round(room[s], 9), -s))
            sides[index] = side
            room[side] -= len(groups[index])
            for name, count in contents[index].items():
                wanted[side][name] -= count
                has[side][name] += count
    return [sides[index] for index in range(len(groups))]


def _split(own: OwnSet, fractions: tuple[float, float], seed: int) -> dict[str, list[Path]]:
    """Split the labeled images; the others, unless near a test image, are for pretraining."""
    labeled = [group for group in own.groups if any(path in own.images for path in group)]
    contents = [
        [[o.name for o in own.images[path].objects] for path in group if path in own.images]
        for group in labeled
    ]
    sides = deal_groups(contents, fractions, seed)
    if len(set(sides)) < 2:
        raise KsclError(
            "The images cannot be split: they are too few, or all near-duplicates. Add images, or "
            "try --split 50/50."
        )
    near_test = {path for group, side in zip(labeled, sides, strict=True) if side for path in group}
    every = sorted(own.ids, key=lambda path: own.ids[path])
    return {
        TRAIN: [path for path in every if path in own.images and path not in near_test],
        TEST: [path for path in every if path in own.images and path in near_test],
        PRETRAIN: [path for path in every if path not in near_test],
    }


# Tiles to pretrain on where objects are small. Two random crops of a photo with many objects mostly
# show different ones; two crops of a tile that is two objects wide mostly share one.

TILES = "tiles"
OBJECTS_WIDE = 2.0  # side of a tile, in sides of an object of median size
LARGE = 0.4  # median object side, relative to the short side, from which photos stay whole
LEAST_SIDE, STORED_SIDE = 48, 96  # pixels: smallest tile, and largest file of one
LEFT_OVER = 0.2  # of a tile's side: this much at the border gets no further row of tiles
MOST_TILES = 5000  # in total, but at least one per photo


def object_side(images: Sequence[AnnotatedImage]) -> float:
    """Return the median side of an object, relative to the short side of its image; 1 without."""
    sides = [
        np.sqrt((x2 - x1) * (y2 - y1)) / min(image.width, image.height)
        for image in images
        for x1, y1, x2, y2 in (thing.box for thing in image.objects)
    ]
    return float(np.median(sides)) if sides else 1.0


def write_tiles(folder: Path, photos: Mapping[str, Path], side: float) -> int:
    """Write the tiles of photos by id into a new folder; return their number.

    `side` is the median object side relative to the short side; large objects need no tiles.
    """
    if side >= LARGE:
        return 0
    folder.mkdir()
    most = max(1, MOST_TILES // len(photos))
    written = 0
    for name, path in photos.items():
        tiles = list(cut(read_image(path), OBJECTS_WIDE * side))
        chosen = sorted(random.Random(name).sample(range(len(tiles)), min(most, len(tiles))))
        for number in chosen:
            _, data = cv2.imencode(".jpg", tiles[number][..., ::-1], (cv2.IMWRITE_JPEG_QUALITY, 95))
            (folder / f"{name}-{number}.jpg").write_bytes(data.tobytes())
        written += len(chosen)
    return written


def cut(picture: np.ndarray, side: float) -> Iterator[np.ndarray]:
    """Yield the tiles of a picture (h, w, 3), row by row; `side` is relative to the short side."""
    height, width = picture.shape[:2]
    pixels = min(height, width, max(LEAST_SIDE, round(side * min(height, width))))
    for top in _starts(height, pixels):
        for left in _starts(width, pixels):
            tile = picture[top : top + pixels, left : left + pixels]
            if pixels > STORED_SIDE:
                tile = cv2.resize(tile, (STORED_SIDE, STORED_SIDE), interpolation=cv2.INTER_AREA)
            yield tile


def _starts(length: int, pixels: int) -> list[int]:
    """Return the starts of evenly spaced tiles, or of one in the middle."""
    number = math.ceil(length / pixels - LEFT_OVER)
    if number <= 1:
        return [(length - pixels) // 2]
    return [round(x) for x in np.linspace(0, length - pixels, number)]


def _report(own: OwnSet) -> str:
    """Return the report on a prepared set."""
    images, classes = own.images, own.class_names()
    counts = {
        split: Counter(o.name for path in own.splits[split] for o in images[path].objects)
        for split in (TRAIN, TEST)
    }
    rows = []
    for name in classes:
        with_it = sum(any(o.name == name for o in i.objects) for i in images.values())
        numbers = [found[name] for found in counts.values()]
        rows.append([name, with_it, sum(numbers), *numbers])
    lines = [
        f"{own.num_files[0]:,} images, {own.num_files[1]:,} annotation files in the format "
        f"{own.format}.",
        tabulate(rows, ["class", "images", "objects", "to train on", "to test on"]),
        _box_sizes(list(images.values())),
        f"Split: {len(own.splits[TRAIN])} images to train on, {len(own.splits[TEST])} to test on.",
    ]
    alike = [[path.name for path in group] for group in own.groups if len(group) > 1]
    if alike:
        lines.append(
            f"Near-duplicates, kept in one split: {sum(map(len, alike))} images in "
            f"{len(alike)} group{'s' if len(alike) > 1 else ''}, e.g. "
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
    if own.left_out:
        lines.append(f"Left out because of problems (--skip-bad): {len(own.left_out)} files.")
        lines.append(list_problems(problem for problem in own.problems if problem.fatal))
    notes = [problem for problem in own.problems if not problem.fatal]
    if notes:
        lines.append(f"Notes:\n{list_problems(notes)}")
    return "\n".join(lines)


def _box_sizes(images: Sequence[AnnotatedImage]) -> str:
    """Return median and spread of the box sizes, absolute and relative."""
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
    """Return the manifest; `lines` describe the content of the files."""
    digest = hashlib.sha256("".join(f"{line}\n" for line in lines).encode())
    return {
        "images": str(request.images.resolve()),
        "format": kind,
        "split": request.split,
        "seed": request.seed,
        "classes": list(classes),
        "content": digest.hexdigest()[:16],
    }


def _write_once(
    target: Path, about: Mapping[str, Any], report: str, write: Callable[[Path], str]
) -> str:
    """Fill the folder by `write`, which adds to the report, unless it holds this set already.

    Raise KsclError if it holds anything else.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        try:
            before = dict(json.loads((target / MANIFEST).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            raise KsclError(
                f"{target} was not created by this tool. Choose another --output-dir."
            ) from None
        changed = [key for key, value in about.items() if before.get(key) != value]
        if changed:
            raise KsclError(
                f"{target} was made from other data or settings ({', '.join(changed)} differ). "
                "Delete it, or choose another --output-dir."
            )
        return f"{report}\n{target} already exists, made from the same files."
    with whole_folder(target) as folder:
        report += write(folder)
        (folder / MANIFEST).write_text(json.dumps(about, indent=1) + "\n", "utf-8")
        (folder / REPORT).write_text(f"{report}\n", "utf-8")
    return report
