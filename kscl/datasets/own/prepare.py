"""Prepare a user's annotated images: read, check, split, write; the user's files never change."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kscl.data.annotated.annotations import AnnotatedImage, list_problems
from kscl.datasets.own import report
from kscl.datasets.own.case import unite_case
from kscl.datasets.own.files import Found, find_files, make_ids
from kscl.datasets.own.near_duplicates import find_groups
from kscl.datasets.own.problems import refuse_problems
from kscl.datasets.own.read import OwnSet, read_own
from kscl.datasets.own.split import deal_groups, parse_split
from kscl.datasets.own.tiles import OBJECTS_WIDE, TILES, object_side, write_tiles
from kscl.datasets.own.write import is_written, refuse_inside, write_about, write_voc
from kscl.errors import KsclError
from kscl.runtime.files import whole_folder

TRAIN, TEST, PRETRAIN = "trainval", "test", "pretrain"


@dataclass(frozen=True)
class Request:
    """What the user asks for."""

    images: Path
    annotations: Path
    output_dir: Path
    split: str = "75/25"
    seed: int = 0
    format: str = ""  # "" is found out
    classes: tuple[str, ...] = ()
    merge_case: bool | None = None  # None: not decided, so names that differ by case are refused
    skip_bad: bool = False


def prepare_own(request: Request) -> str:
    """Write the set and return the report; one KsclError names all problems before it."""
    fractions = parse_split(request.split)
    refuse_inside(request.output_dir, request.images, request.annotations)
    found = find_files(request.images, request.annotations, request.format)
    own = read_own(found, request.images, request.annotations, request.classes or None)
    _merge_case(own, request.merge_case)
    left_out = _leave_out(own, request.skip_bad)
    if not any(image.objects for image in own.images):
        raise KsclError(f"{request.annotations}: no image has an object. Check --annotations.")
    paths = [image.path for image in own.images if image.path is not None] + own.unlabeled
    ids = make_ids(paths, request.images)
    images = {ids[image.path]: image for image in own.images if image.path is not None}
    unlabeled = {ids[path]: path for path in own.unlabeled}
    groups = find_groups(paths)
    names = [ids[path] for path in paths]
    splits = _split(
        [[names[i] for i in group] for group in groups], images, fractions, request.seed
    )
    classes = sorted({thing.name for image in own.images for thing in image.objects})
    about = _about(request, found.format, images, unlabeled, classes, left_out)
    text = _tell(found, own, images, splits, classes, left_out, groups, paths)
    if is_written(request.output_dir, about):
        return f"{text}\n{request.output_dir} is there already, made from the same files."
    with whole_folder(request.output_dir) as folder:
        write_voc(folder, images, unlabeled, splits, classes)
        side = object_side([images[name] for name in splits[TRAIN]])
        photos = {ids[path]: path for path in paths if ids[path] in set(splits[PRETRAIN])}
        tiles = write_tiles(folder / TILES, photos, side)
        if tiles:
            text += (
                f"\nTiles to pretrain on: {tiles:,}, about {OBJECTS_WIDE:g} objects wide, of the "
                f"{len(photos):,} images that are not to test on."
            )
        write_about(folder, about, text)
    return text


def _merge_case(own: OwnSet, merge: bool | None) -> None:
    """Unite class names that differ only by case, or note them as problems."""
    counts = Counter(thing.name for image in own.images for thing in image.objects)
    new, problems = unite_case(counts, merge, "object", lambda name: _first_with(name, own))
    own.problems += problems
    own.images = [
        replace(
            image,
            objects=tuple(replace(o, name=new.get(o.name, o.name)) for o in image.objects),
        )
        for image in own.images
    ]


def _first_with(name: str, own: OwnSet) -> str:
    """Return an annotation file with an object of this class."""
    return next(i.annotation for i in own.images if name in {thing.name for thing in i.objects})


def _leave_out(own: OwnSet, skip_bad: bool) -> list[str]:
    """Raise all fatal problems, or leave out the images and annotations that have one."""
    fatal = [problem for problem in own.problems if problem.fatal]
    if not fatal:
        return []
    refuse_problems(fatal, skip_bad)
    where = {problem.where for problem in fatal}
    per_file = Counter(image.annotation for image in own.images)
    shared = [p for p in fatal if per_file[p.where] > 1]  # a COCO file names no single image
    if shared:
        raise KsclError(
            f"--skip-bad cannot tell which images these are about:\n{list_problems(shared)}\n"
            "Correct the file."
        )
    bad = [i for i in own.images if i.annotation in where or str(i.path) in where]
    own.images = [image for image in own.images if image not in bad]
    own.unlabeled = [path for path in own.unlabeled if str(path) not in where]
    return sorted({str(image.path) for image in bad} | where)


def _split(
    groups: list[list[str]],
    images: dict[str, AnnotatedImage],
    fractions: tuple[float, float],
    seed: int,
) -> dict[str, list[str]]:
    """Deal the annotated images out; the others are for pretraining, unless near a test image."""
    labeled = [group for group in groups if any(name in images for name in group)]
    contents = [
        [[o.name for o in images[name].objects] for name in group if name in images]
        for group in labeled
    ]
    sides = deal_groups(contents, fractions, seed)
    if len(set(sides)) < 2:
        raise KsclError(
            "The images cannot be split: they are too few, or all nearly the same picture. Add "
            "images, or give the parts more alike with --split 50/50."
        )
    test_groups = [group for group, side in zip(labeled, sides, strict=True) if side == 1]
    near_test = {name for group in test_groups for name in group}
    every = sorted(name for group in groups for name in group)
    return {
        TRAIN: [name for name in every if name in images and name not in near_test],
        TEST: [name for name in every if name in images and name in near_test],
        PRETRAIN: [name for name in every if name not in near_test],
    }


def _about(
    request: Request,
    kind: str,
    images: dict[str, AnnotatedImage],
    unlabeled: dict[str, Path],
    classes: Sequence[str],
    left_out: Sequence[str],
) -> dict[str, Any]:
    digest = hashlib.sha256()
    for image_id, image in sorted(images.items()):
        assert image.path is not None
        digest.update(f"{image_id} {image.path.stat().st_size} {image.objects}\n".encode())
    for image_id, path in sorted(unlabeled.items()):
        digest.update(f"{image_id} {path.stat().st_size}\n".encode())
    return {
        "images": str(request.images.resolve()),
        "annotations": str(request.annotations.resolve()),
        "format": kind,
        "split": request.split,
        "seed": request.seed,
        "classes": list(classes),
        "left_out": list(left_out),
        "tiles": OBJECTS_WIDE,
        "content": digest.hexdigest()[:16],
    }


def _tell(
    found: Found,
    own: OwnSet,
    images: dict[str, AnnotatedImage],
    splits: dict[str, list[str]],
    classes: Sequence[str],
    left_out: Sequence[str],
    groups: Sequence[Sequence[int]],
    paths: Sequence[Path],
) -> str:
    alike = [group for group in groups if len(group) > 1]
    lines = [
        f"{len(found.images):,} images, {len(found.annotations):,} annotation files in the format "
        f"{found.format}.",
        report.class_table(images, splits, classes),
        report.box_sizes(own.images),
        f"Split: {len(splits[TRAIN])} images to train on, {len(splits[TEST])} to test on.",
    ]
    if alike:
        first = ", ".join(paths[index].name for index in alike[0][: report.SHOWN])
        lines.append(
            f"Nearly the same picture, so kept on one side: {sum(map(len, alike))} images in "
            f"{len(alike)} group{'s' if len(alike) > 1 else ''}; one is {first}."
        )
    if own.unlabeled:
        lines.append(
            f"Without annotation, used for pretraining only: {report.listed(own.unlabeled)}."
        )
    lines += report.few(images, splits, classes)
    if found.odd:
        lines.append(f"Not used: {report.listed(found.odd)}.")
    if left_out:
        lines.append(f"Left out because of problems (--skip-bad): {len(left_out)} files.")
        lines.append(list_problems(problem for problem in own.problems if problem.fatal))
    notes = [problem for problem in own.problems if not problem.fatal]
    if notes:
        lines.append(f"Notes:\n{list_problems(notes)}")
    return "\n".join(lines)
