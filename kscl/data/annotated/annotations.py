"""Annotated images as every reader hands them on, and the problems it met on the way.

Boxes are (x1, y1, x2, y2) in 0-based coordinates, as Detectron2 has them: a box over a whole image
is (0, 0, width, height), whatever the file counts from.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from kscl.data.annotated.masks import Mask, Polygons, RunLengths, extent
from kscl.data.formats import CONVERT, COPY_AGAIN, UnreadableImage, open_image
from kscl.data.source import open_regular
from kscl.errors import KsclError, printable

SHOWN_PER_KIND = 20  # on screen; `Problem`s are all kept
SHOWN_CHARACTERS = 500  # of each part of a problem: a file may have anything in place of a name
MAX_SIDE = 2**31  # pixels; a larger number is not a size
UNKNOWN_CLASS, CLASS_CASE = "unknown class", "case of a class"  # kinds of problems

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Problem:
    """One thing to fix: where it is, what it is and how. A note is reported but stops nothing."""

    kind: str
    where: str
    what: str
    fix: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{_one_line(self.where)}: {_one_line(self.what)}. {_one_line(self.fix)}."


def _one_line(text: str) -> str:
    """Escape what breaks a line or a terminal, such as undecodable bytes, and shorten the text."""
    if len(text) > SHOWN_CHARACTERS:
        text = f"{text[:SHOWN_CHARACTERS]}…"
    return printable(text)


@dataclass(frozen=True, slots=True)
class AnnotatedObject:
    """One object; the defaults are those that VOC files without the tag are read with."""

    name: str
    box: Box
    difficult: bool = False  # in COCO files: a crowd
    truncated: bool = False
    pose: str = "Unspecified"
    area: float | None = None  # of the mask where the file has one, else of the box
    mask: Mask | None = None  # where the file has one and it was asked for


@dataclass(frozen=True, slots=True)
class AnnotatedImage:
    """One image and the objects in it."""

    id: str
    path: Path | None
    width: int
    height: int
    objects: tuple[AnnotatedObject, ...]
    annotation: str  # the file that says so, for messages


@dataclass
class AnnotatedSet:
    """One split of a data set, read whole: what is good in it, and every problem of the rest."""

    name: str
    class_names: tuple[str, ...]
    images: list[AnnotatedImage] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Count the objects of each class that are to be found (difficult ones are not)."""
        found = Counter(o.name for image in self.images for o in image.objects if not o.difficult)
        return {name: found[name] for name in self.class_names}

    @property
    def usable(self) -> bool:
        """Whether no problem is fatal."""
        return not any(problem.fatal for problem in self.problems)

    def checked(self) -> AnnotatedSet:
        """Return this set, or raise one KsclError with every problem that makes it unusable."""
        if not self.usable:
            fatal = [problem for problem in self.problems if problem.fatal]
            raise KsclError(f"{self.name} cannot be used:\n{list_problems(fatal)}")
        return self


def list_problems(problems: Iterable[Problem]) -> str:
    """Write one line per problem, grouped by kind; of a frequent kind the rest is counted."""
    by_kind: dict[str, list[Problem]] = {}
    for problem in problems:
        by_kind.setdefault(problem.kind, []).append(problem)
    lines = []
    for kind, found in by_kind.items():
        lines += [f"  [{kind}] {problem}" for problem in found[:SHOWN_PER_KIND]]
        if len(found) > SHOWN_PER_KIND:
            lines.append(f"  [{kind}] … and {len(found) - SHOWN_PER_KIND} more like these")
    return "\n".join(lines)


def check_class_names(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the list as a tuple; raise KsclError unless an index into it means one class."""
    if not names:
        raise KsclError(f"{where}: the class list is empty. Name at least one class.")
    for name in names:
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise KsclError(
                f"{where}: {_one_line(ascii(name))} in the class list is not a name. Correct it."
            )
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        raise KsclError(f"{where}: {', '.join(repeated)} is in the class list twice. List it once.")
    return tuple(names)


def class_problem(name: str, classes: Sequence[str], where: str) -> Problem:
    """Return what is wrong with a class that is not in the list: the same for all its objects."""
    in_case = [other for other in classes if other.casefold() == name.casefold()]
    if in_case:
        what = f"the class '{name}' differs from '{in_case[0]}' in upper and lower case"
        fix = "Correct it, or let tools/prepare_data.py own --merge-case do it"
        return Problem(CLASS_CASE, where, what, fix)
    near = difflib.get_close_matches(name, classes, 1, cutoff=0.7)
    fix = f"Did you mean '{near[0]}'? Correct it" if near else "Correct the name"
    fix += f", or add it to the class list ({', '.join(classes[:20])})"
    return Problem(UNKNOWN_CLASS, where, f"the class '{name}' is not in the list", fix)


def one_line_per_class(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems, of every class that is not in the list the first, with their number."""
    kinds = (UNKNOWN_CLASS, CLASS_CASE)
    problems = list(problems)
    counts = Counter(problem.what for problem in problems if problem.kind in kinds)
    kept = []
    for problem in problems:
        if problem.kind not in kinds:
            kept.append(problem)
        elif count := counts.pop(problem.what, 0):
            objects = f"{count} object{'s' if count > 1 else ''}"
            kept.append(replace(problem, what=f"{problem.what} ({objects})"))
    return kept


def is_ordered(box: Box) -> bool:
    """Return whether a table of boxes can hold it; one without area can, one turned over cannot."""
    return box[0] <= box[2] and box[1] <= box[3]


def check_box(box: Box, width: int, height: int, where: str, what: str) -> list[Problem]:
    """Return what is wrong with a box in an image of this size (0 x 0: not known).

    `what` tells the object and its box as the file has them, for the message.
    """
    x1, y1, x2, y2 = box
    if not (x1 < x2 and y1 < y2):
        fix = "Correct it so that the maxima are above the minima, or delete the object"
        return [Problem("degenerate box", where, f"{what} has no area", fix)]
    problems = []
    outside = max(-x1, -y1, x2 - width, y2 - height) if width and height else 0
    # Files that count from 0 instead of 1 are one pixel off; Detectron2 clips that in training.
    if outside > 1:
        fix = "Correct the box, or the size if it belongs to another image"
        text = f"{what} is {outside:g} pixels outside its {width} x {height} image"
        problems.append(Problem("box outside", where, text, fix))
    elif outside > 0:
        text = f"{what} is up to a pixel outside its {width} x {height} image"
        fix = "It is clipped in training; VOC counts pixels from 1, perhaps this file from 0"
        problems.append(Problem("box at the border", where, text, fix, fatal=False))
    if min(x2 - x1, y2 - y1) <= 1:
        fix = "It is used as it is; delete the object if it was a slip of the mouse"
        text = f"{what} is one pixel wide or high"
        problems.append(Problem("tiny box", where, text, fix, fatal=False))
    return problems


def check_mask(
    mask: Mask, box: Box, width: int, height: int, where: str, what: str
) -> Iterator[Problem]:
    """Yield what is wrong with the mask of an object in an image of this size."""
    if isinstance(mask, RunLengths) and (mask.width, mask.height) != (width, height):
        text = f"{what} has a mask for an image of {mask.width} x {mask.height}"
        fix = f"Write the mask for its image, which is {width} x {height}"
        yield Problem("mask size", where, text, fix)
        return
    around = extent(mask)
    lines = isinstance(mask, Polygons) and any(len(points) < 3 for points in mask.parts)
    if lines or around is None or not (around[0] < around[2] and around[1] < around[3]):
        fix = "Draw the mask again, or delete the object"
        yield Problem("degenerate mask", where, f"{what} has a mask without area", fix)
        return
    outside = max(-around[0], -around[1], around[2] - width, around[3] - height)
    if outside > 1:
        text = f"{what} has a mask that is {outside:g} pixels outside its {width} x {height} image"
        fix = "Correct the mask, or the size if it belongs to another image"
        yield Problem("mask outside", where, text, fix)
    elif around[0] >= box[2] or around[2] <= box[0] or around[1] >= box[3] or around[3] <= box[1]:
        text = f"{what} has a mask that lies beside its box"
        yield Problem("mask beside its box", where, text, "Correct the mask or the box")


def leads_out(name: str) -> bool:
    """Return whether a relative name from a file would reach beyond the data set's folder."""
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or "\0" in name


_ORIENTATION = 0x0112  # the EXIF tag
_TURNED = (5, 6, 7, 8)  # orientations that swap width and height
_DEEP_MODES = ("I", "F")  # of 16 and 32 bits per pixel, "I;16" too


class UnusableImage(KsclError):
    """An image file that cannot be used: the message is the reason alone, `fix` what helps."""

    def __init__(self, reason: str, fix: str = COPY_AGAIN) -> None:
        super().__init__(reason)
        self.fix = fix


def image_size(path: Path, decode: bool = False) -> tuple[int, int]:
    """Return (width, height) after the EXIF turn that Detectron2 makes; `decode` reads all pixels.

    Raise UnusableImage for a file that cannot be used.
    """
    try:
        with open_regular(path) as file, open_image(file) as image:
            width, height = image.size
            # Asked of `info` first: getexif() would decode a whole PNG to find none.
            exif = image.getexif() if "exif" in image.info else {}
            if image.mode.split(";")[0] in _DEEP_MODES:
                raise UnreadableImage(
                    "it has more than 8 bits per pixel, which turn white when read as RGB "
                    f"(mode {image.mode})",
                    CONVERT,
                )
            if decode:
                image.load()
    except UnreadableImage as error:
        raise UnusableImage(f"cannot be used: {error}", error.fix) from error
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {getattr(error, 'strerror', '') or error}"
        raise UnusableImage(reason, "Make it readable") from error
    return (height, width) if exif.get(_ORIENTATION) in _TURNED else (width, height)
