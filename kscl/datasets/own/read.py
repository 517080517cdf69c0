"""Find and read a user's images and annotations; every problem is noted, none stops the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from kscl.data.annotations import (
    ANNOTATION_FORMATS,
    AnnotatedImage,
    Files,
    Problem,
    UnusableImage,
    image_size,
    list_files,
    read_files,
)
from kscl.data.formats import is_image
from kscl.errors import KsclError

SHOWN = 3  # reasons why files are not annotations
THREADS = 8  # decoding waits for the disk, and OpenCV and Pillow let other threads run


@dataclass
class OwnSet:
    """Annotated images, images without annotations, and all problems."""

    format: str
    files: Files
    odd: list[Path]  # files of no known use
    images: list[AnnotatedImage] = field(default_factory=list)
    unlabeled: list[Path] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def read_own(
    images: Path, annotations: Path, wanted: str = "", classes: tuple[str, ...] = ()
) -> OwnSet:
    """Read all annotations and decode all images.

    The format is found out unless it is `wanted`; `classes` are for one that has only numbers.
    """
    own = find_files(images, annotations, wanted)
    own.files.classes = classes
    found = read_files(ANNOTATION_FORMATS[own.format], own.files)
    own.images, own.problems = found.images, found.problems
    sizes: dict[Path, tuple[int, int] | None] = {
        image.path: (image.width, image.height) for image in own.images if image.path is not None
    }
    reported = {problem.where for problem in own.problems}
    others = [path for path in own.files.images.values() if path not in sizes]
    own.unlabeled = [path for path in others if str(path) not in reported]
    problems = check_images(sizes | dict.fromkeys(own.unlabeled))
    own.problems += [problem for problem in problems if problem.where not in reported]
    return own


def find_files(images: Path, annotations: Path, wanted: str = "") -> OwnSet:
    """List images and annotations; raise KsclError if the format is not clear."""
    formats = ANNOTATION_FORMATS
    suffixes = tuple(each.suffix for each in formats.values())
    below = list_files(images)
    others = {n: path for n, path in below.items() if not n.lower().endswith(suffixes)}
    pictures = {name: path for name, path in others.items() if is_image(name)}
    if not pictures:
        raise KsclError(f"{images} holds no image. Check --images.")
    odd = [path for name, path in others.items() if name not in pictures]
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
            reason = each.refusal(path)
            if not reason:
                good[each.name][name] = path
            else:
                reasons.append(f"{path.name} {reason}")
                if each.is_damaged(path, stems):
                    damaged[each.name][name] = path
    kinds = [kind for kind in formats if good[kind] or (kind == wanted and damaged[kind])]
    if not kinds or (wanted and wanted not in kinds):
        expected = formats[wanted].files if wanted else ", ".join(f.files for f in formats.values())
        raise KsclError(
            f"{annotations} holds no annotations: expected {expected}. "
            f"{''.join(f'{reason}. ' for reason in reasons[:SHOWN])}Check --annotations."
        )
    if len(kinds) > 1 and not wanted:
        counts = ", ".join(f"{len(good[kind])} of {kind}" for kind in kinds)
        raise KsclError(
            f"{annotations} holds annotations in several formats ({counts}). Choose one with "
            f"--format {kinds[0]}."
        )
    kind = wanted or kinds[0]
    # What is damaged is reported with the other problems, or else its images would be unlabeled.
    used = good[kind] | damaged[kind]
    companions = formats[kind].companions
    unused = [p for n, p in labels.items() if n not in used and p.name not in companions]
    odd = list(dict.fromkeys(odd + unused))
    return OwnSet(kind, Files(images, pictures, annotations, used), odd)


def check_images(sizes: Mapping[Path, tuple[int, int] | None]) -> list[Problem]:
    """Decode images, and compare their sizes with what the annotations say if they say any."""
    with ThreadPoolExecutor(THREADS) as threads:
        return [p for p in threads.map(_image_problem, sizes, sizes.values()) if p is not None]


def _image_problem(path: Path, annotated: tuple[int, int] | None) -> Problem | None:
    try:
        size = image_size(path, decode=True)
    except UnusableImage as error:
        return Problem("unreadable image", str(path), str(error), f"{error.fix}, or remove it")
    if annotated is None or annotated == size:
        return None
    what = f"is {size[0]} x {size[1]} pixels as shown, but {annotated[0]} x {annotated[1]} in its "
    fix = "Correct the size there if the boxes fit the image, otherwise annotate it again"
    return Problem("image size", str(path), f"{what}annotation", fix)
