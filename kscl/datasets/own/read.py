"""Read a user's annotations in any of the formats; every problem is noted, none stops the rest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from xml.etree.ElementTree import Element

from kscl.data.annotated.annotations import AnnotatedImage, Problem
from kscl.data.annotated.coco import missing_image, read_coco
from kscl.data.annotated.image_size import image_size
from kscl.data.annotated.voc import names_in, read_tree
from kscl.data.annotated.xml import parse_xml
from kscl.data.annotated.yolo import read_class_names, read_labels
from kscl.datasets.own.files import Found, Images
from kscl.errors import KsclError

THREADS = 8  # decoding waits for the disk, and OpenCV and Pillow let other threads run


@dataclass
class OwnSet:
    """Annotated images, images without annotations, and all problems."""

    images: list[AnnotatedImage] = field(default_factory=list)
    unlabeled: list[Path] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def read_own(
    found: Found, images: Path, annotations: Path, classes: Sequence[str] | None
) -> OwnSet:
    """Read all annotations and decode all images; classes are needed where YOLO lists none."""
    own = OwnSet()
    if found.format == "coco":
        _read_coco(found, images, own)
    elif found.format == "voc":
        _read_xml(found, own)
    else:
        folder = annotations if annotations.is_dir() else annotations.parent
        _read_yolo(found, own, classes or _listed_classes(folder, images))
    own.images = _without_repeats(own)
    named = {image.path for image in own.images}
    reported = {problem.where for problem in own.problems}
    own.unlabeled = [
        path for path in found.images.values() if path not in named and str(path) not in reported
    ]
    _check_images(own)
    return own


def _read_xml(found: Found, own: OwnSet) -> None:
    trees: list[tuple[str, Path, Element]] = []
    for name, path in found.annotations.items():
        try:
            trees.append((name, path, parse_xml(path)))
        except KsclError as error:
            fix = "Write the annotation anew, or remove the file"
            own.problems.append(Problem("unreadable annotation", str(path), str(error), fix))
    classes = tuple(sorted({name for _, _, tree in trees for name in names_in(tree)}))
    known = Images(found.images)
    for name, path, tree in trees:
        file_name = (tree.findtext("filename") or "").strip()
        image_path = _image_of(path, name, [file_name], known, own.problems)
        if image_path is not None:
            where = str(path)
            own.images.append(read_tree(tree, "", image_path, where, classes, own.problems))


def _read_yolo(found: Found, own: OwnSet, classes: Sequence[str]) -> None:
    known = Images(found.images)
    for name, path in found.annotations.items():
        image_path = _image_of(path, name, [], known, own.problems)
        if image_path is not None:
            image = read_labels(path, "", image_path, tuple(classes), own.problems)
            if image is not None:
                own.images.append(image)


def _listed_classes(folder: Path, images: Path) -> tuple[str, ...]:
    nearby = dict.fromkeys((folder, folder.parent, images, images.parent))
    names = read_class_names(nearby)
    if names is None:
        raise KsclError(
            f"{folder} has YOLO labels, whose classes are numbers, but neither it nor the folders "
            "around it have a classes.txt, obj.names or data.yaml with their names. Give them in "
            "order with --classes NAME NAME …"
        )
    return names


def _image_of(
    path: Path, name: str, also: list[str], known: Images, problems: list[Problem]
) -> Path | None:
    pure = PurePosixPath(name)
    try:
        image = known.belonging_to([str(pure.with_suffix("")), pure.stem, *filter(None, also)])
    except KsclError as error:
        fix = "Give the annotation the path or the name of its image"
        problems.append(Problem("ambiguous image", str(path), str(error), fix))
        return None
    if image is None:
        what, fix = "no image has its name", "Add the image, or remove the annotation"
        problems.append(Problem("missing image", str(path), what, fix))
    return image


def _read_coco(found: Found, images: Path, own: OwnSet) -> None:
    known = Images(found.images)
    for path in found.annotations.values():
        inside, folder = [images], Path(os.path.abspath(path.parent))
        if folder.is_relative_to(os.path.abspath(images)):  # each folder may have its own file
            inside.append(images / folder.relative_to(os.path.abspath(images)))
        find = partial(_image_of_coco, known, inside, [images.parent, path.parent])
        reading = read_coco(path, find_image=find)
        own.images += reading.images
        own.problems += reading.problems


def _image_of_coco(
    known: Images, inside: list[Path], outside: list[Path], file_name: str
) -> Path | Problem:
    """Return the image with this path below a folder, or else with this name, or the problem."""
    try:
        image = (
            _below(inside, file_name)
            or known.belonging_to([file_name])
            or _below(outside, file_name)  # the name may begin with that of the folder of images
        )
    except KsclError as error:
        fix = "Write the path of the image as its file_name"
        return Problem("ambiguous image", str(inside[0] / file_name), str(error), fix)
    return image or missing_image(inside[0] / file_name)


def _below(roots: list[Path], file_name: str) -> Path | None:
    return next((root / file_name for root in roots if os.path.isfile(root / file_name)), None)


def _without_repeats(own: OwnSet) -> list[AnnotatedImage]:
    """Keep one annotation per image; a second one is a problem."""
    kept: dict[Path | None, AnnotatedImage] = {}
    for image in own.images:
        path = image.path.resolve() if image.path is not None else None
        first = kept.setdefault(path, image)
        if first is not image:
            what = f"is annotated twice: in {first.annotation} and in {image.annotation}"
            fix = "Remove one of the annotations"
            own.problems.append(Problem("duplicate annotation", str(image.path), what, fix))
    return sorted(kept.values(), key=lambda image: str(image.path))  # whatever the format


def _check_images(own: OwnSet) -> None:
    """Decode every image, and compare its size with what the annotation says."""
    sizes: dict[Path, tuple[int, int] | None] = {
        image.path: (image.width, image.height) for image in own.images if image.path is not None
    }
    sizes |= dict.fromkeys(own.unlabeled)
    reported = {problem.where for problem in own.problems}
    with ThreadPoolExecutor(THREADS) as threads:
        results = threads.map(_image_problem, sizes.keys(), sizes.values())
        own.problems += [p for p in results if p is not None and p.where not in reported]


def _image_problem(path: Path, annotated: tuple[int, int] | None) -> Problem | None:
    try:
        size = image_size(path, decode=True)
    except KsclError as error:
        fix = "Replace the image, or convert it to 8-bit RGB"
        return Problem("unreadable image", str(path), str(error), fix)
    if annotated in (None, size):
        return None
    assert annotated is not None
    what = f"is {size[0]} x {size[1]} pixels as shown, but {annotated[0]} x {annotated[1]} in its "
    fix = "Correct the size there if the boxes fit the image, otherwise annotate it again"
    return Problem("image size", str(path), f"{what}annotation", fix)
