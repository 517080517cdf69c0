"""Cityscapes as it is on disk: leftImg8bit/SPLIT/CITY/*.png and gtFine/SPLIT/CITY/*.

Objects are read from `*_gtFine_instanceIds.png`, the pixels that Cityscapes itself scores with: an
object's pixels are 1000 times its label plus a number, those of a group the label alone. A group is
a crowd here: neither trained on nor scored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kscl.data.annotations import (
    UNREADABLE,
    AnnotatedObject,
    AnnotatedSet,
    AnnotationFormat,
    Classes,
    Files,
    Source,
    annotation_format,
    check_class_names,
)
from kscl.data.formats import UnreadableImage, open_image
from kscl.data.masks import RunLengths, extent
from kscl.data.source import in_threads, open_regular

# Labels with instances that are evaluated (cityscapesScripts, helpers/labels.py).
LABELS = {
    24: "person",
    25: "rider",
    26: "car",
    27: "truck",
    28: "bus",
    31: "train",
    32: "motorcycle",
    33: "bicycle",
}
CITYSCAPES_CLASSES = tuple(LABELS.values())
CITYSCAPES_NAMES = {
    f"cityscapes_fine_instance_seg_{split}": (
        f"cityscapes/gtFine/{split}",
        f"cityscapes/leftImg8bit/{split}",
    )
    for split in ("train", "val")  # the annotations of test were never published
}
PER_LABEL = 1000  # numbers of objects
IMAGE_END, TRUTH_END = "_leftImg8bit.png", "_gtFine_instanceIds.png"
DOWNLOAD = "Unpack leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip there"


@annotation_format
class Cityscapes(AnnotationFormat):
    """One picture of object numbers per image."""

    name = "cityscapes"
    files = f"Cityscapes' *{TRUTH_END} files"
    suffix = TRUTH_END.lower()
    form = "cityscapes:TRUTH_FOLDER:IMAGE_FOLDER"
    official = CITYSCAPES_NAMES
    crowds = True

    def read(self, files: Files) -> AnnotatedSet:
        """Read pictures of object numbers, wherever they and their images are."""
        found = AnnotatedSet(self.name, CITYSCAPES_CLASSES)
        pairs: list[tuple[Path, Path | None]] = []
        for name, path in files.annotations.items():
            image_name = name[: -len(TRUTH_END)] + IMAGE_END
            image = files.image_of(name, found, [image_name, PurePosixPath(image_name).name])
            if image is not None:
                pairs.append((path, image))
        _add_images(pairs, found, masks=False)
        return found

    def read_set(self, source: Source, classes: Classes, images: bool, masks: bool) -> AnnotatedSet:
        """Read one split from its folders of images and of fine annotations."""
        root, truth = source.root, source.truth
        listed = check_class_names(classes or CITYSCAPES_CLASSES, source.name)
        found = AnnotatedSet(source.name, listed)
        annotated = _files(truth, TRUTH_END)
        if not annotated:
            what = f"no city's folder in it has a file *{TRUTH_END}"
            found.note("missing folder", truth, what, DOWNLOAD)
            return found
        for key in sorted(set(_files(root, IMAGE_END)) - set(annotated)) if images else ():
            what = f"its annotation {truth / key}{TRUTH_END} is not there"
            fix = "Copy it there, or remove the image"
            found.note("missing file", f"{root / key}{IMAGE_END}", what, fix)
        pairs = [
            (path, root / f"{key}{IMAGE_END}" if images else None)
            for key, path in annotated.items()
        ]
        _add_images(pairs, found, masks)
        return found

    def class_names(self, source: Source) -> tuple[str, ...]:
        return CITYSCAPES_CLASSES


def _files(folder: Path, end: str) -> dict[str, Path]:
    """Return the files CITY/NAME`end`, by CITY/NAME in order."""
    paths = sorted(folder.glob(f"*/*{end}")) if os.path.isdir(folder) else []
    return {str(path.relative_to(folder)).removesuffix(end): path for path in paths}


Objects = list[tuple[AnnotatedObject, str]]


def _add_images(
    pairs: Sequence[tuple[Path, Path | None]], found: AnnotatedSet, masks: bool
) -> None:
    """Add what annotations say about their images to a set."""

    def read(pair: tuple[Path, Path | None]) -> tuple[tuple[int, int], Objects] | Exception:
        try:
            return _read_objects(pair[0], masks)
        except (UnreadableImage, OSError, ValueError) as error:
            return error

    for (path, image), result in zip(pairs, in_threads(read, pairs), strict=True):
        if isinstance(result, Exception):
            found.note(UNREADABLE, path, result, "Copy it again")
        else:
            found.add_image(image, *result, path, path.name.removesuffix(TRUTH_END))


def _read_objects(path: Path, masks: bool) -> tuple[tuple[int, int], Objects]:
    """Return the image's (width, height) and its objects."""
    with open_regular(path) as file, open_image(file) as picture:
        ids = np.asarray(picture)
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise ValueError("its pixels are not single numbers")
    objects = []
    for number, mask in _instances(ids):
        crowd = number < PER_LABEL
        name = LABELS.get(number if crowd else number // PER_LABEL)
        if name is not None:
            box = extent(mask)
            assert box is not None  # every number has a pixel
            area, kept = float(mask.counts[1::2].sum()), mask if masks else None
            thing = AnnotatedObject(name, box, difficult=crowd, area=area, mask=kept)
            objects.append((thing, f"'{name}' {number}"))
    height, width = ids.shape
    return (width, height), objects


def _instances(ids: NDArray[Any]) -> Iterator[tuple[int, RunLengths]]:
    """Yield the numbers of objects and groups in an image (H, W), each with its pixels' runs."""
    height, width = ids.shape
    flat = ids.T.ravel().astype(np.int64)
    starts = np.concatenate([[0], np.flatnonzero(flat[1:] != flat[:-1]) + 1])
    ends = np.append(starts[1:], flat.size)
    values = flat[starts]
    for number in np.unique(values[values >= min(LABELS)]):
        mine = values == number
        bounds = np.stack([starts[mine], ends[mine]], axis=1).ravel()
        counts = np.diff(bounds, prepend=0, append=flat.size)
        if counts[-1] == 0:  # the last pixel is its own
            counts = counts[:-1]
        yield int(number), RunLengths(height, width, counts)
