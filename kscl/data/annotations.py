"""Annotated images, the problems met while reading them, and the formats they come in.

A format is one file of kscl/data/annotated, or of any other module that is imported: a class with
`@annotation_format`. Own data, training, scoring, probes and preflight go through the registry.
A set is named `voc:FOLDER:SPLIT`, `coco:FILE.json:IMAGES`, …; Detectron2's names
(voc_2007_trainval, coco_2017_val, …) lie below $DETECTRON2_DATASETS. Nothing here needs Detectron2.

Boxes are (x1, y1, x2, y2) in 0-based coordinates, as Detectron2 has them: a box over a whole image
is (0, 0, width, height), whatever the file counts from.
"""

from __future__ import annotations

import difflib
import os
import pkgutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TypeVar

import kscl.data.annotated
from kscl.data.formats import CONVERT, COPY_AGAIN, UnreadableImage, is_image, open_image
from kscl.data.masks import Mask, Polygons, RunLengths, extent
from kscl.data.source import Walk, open_regular, walk_files
from kscl.errors import KsclError, printable
from kscl.registry import Registry

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


DATASETS_VARIABLE = "DETECTRON2_DATASETS"

# What public benchmarks have, and everyone trains and scores with.
QUIRKS = (
    "degenerate box",
    "box outside",
    "degenerate mask",
    "mask outside",
    "mask beside its box",
)


@dataclass(frozen=True)
class Source:
    """Where a data set is, and in which format."""

    name: str  # as the config has it
    format: str
    root: Path  # the folder of its images, or the VOC folder
    split: str = ""  # VOC only
    annotations: Path | None = None  # the file or folder of annotations, unless below the root
    official: bool = False  # a public benchmark: its quirks are part of it, and reported as notes

    @property
    def parts(self) -> tuple[Path, ...]:
        """The files and folders that it consists of."""
        return (self.root,) if self.annotations is None else (self.root, self.annotations)

    @property
    def image_folder(self) -> Path:
        """The folder that image names are relative to."""
        return self.root / ANNOTATION_FORMATS[self.format].image_subfolder


@dataclass
class Files:
    """Images and the annotation files of one format, by path below their folders."""

    image_root: Path
    images: dict[str, Path]
    annotation_root: Path
    annotations: dict[str, Path]
    classes: tuple[str, ...] = ()  # given by the user, for formats that have only numbers

    def image_of(
        self, name: str, path: Path, problems: list[Problem], also: Sequence[str] = ()
    ) -> Path | None:
        """Return the image with the name of an annotation file or one of `also`, or note why."""
        pure = PurePosixPath(name)
        try:
            image = self.find([str(pure.with_suffix("")), pure.stem, *filter(None, also)])
        except KsclError as error:
            fix = "Give the annotation the path or the name of its image"
            problems.append(Problem("ambiguous image", str(path), str(error), fix))
            return None
        if image is None:
            what, fix = "no image has its name", "Add the image, or remove the annotation"
            problems.append(Problem("missing image", str(path), what, fix))
        return image

    def find(self, names: Iterable[str]) -> Path | None:
        """Return the image of the first name that is known; raise KsclError if several have it."""
        for name in names:
            paths = self._by_name.get(name.replace("\\", "/").removeprefix("./"), set())
            if len(paths) == 1:
                return next(iter(paths))
            if paths:
                listed = ", ".join(sorted(map(str, paths))[:4])
                raise KsclError(f"it could belong to any of {listed}")
        return None

    @cached_property
    def _by_name(self) -> Mapping[str, set[Path]]:
        """Images by the names under which annotations may know them."""
        found: dict[str, set[Path]] = defaultdict(set)
        for name, path in self.images.items():
            pure = PurePosixPath(name)
            for key in (str(pure), str(pure.with_suffix("")), pure.name, pure.stem):
                found[key].add(path)
        whole = set(found)
        for name, path in self.images.items():
            folders = PurePosixPath(name).parts[1:-1]
            for start in range(len(folders)):  # the annotations may begin further down
                end = PurePosixPath(*folders[start:], PurePosixPath(name).name)
                for key in {str(end), str(end.with_suffix(""))} - whole:
                    found[key].add(path)
        return found


def list_files(root: Path) -> dict[str, Path]:
    """Return every file below a folder, or the one file, by its path below the folder."""
    if os.path.isfile(root):
        return {root.name: root}
    if not os.path.isdir(root):
        raise KsclError(f"{root} is not there. Check the path.")
    return dict(sorted((name, Path(entry.path)) for name, entry in walk_files(str(root), Walk())))


class AnnotationFormat:
    """How annotations of one format are recognized and read.

    A format must have `name`, `files`, `suffix` and `read`. With these alone, data in it can be
    prepared (tools/prepare_data.py own) and used in configs as `NAME:ANNOTATIONS:IMAGES`.
    """

    name: str  # for --format, and before the colon in the name of a set
    files: str  # what its files are, for messages
    suffix: str  # what the names of its files end in, in lower case
    companions: tuple[str, ...] = ()  # files beside the annotations that it reads too
    form = ""  # of the name of a set, if it is not NAME:ANNOTATIONS:IMAGES
    official: Mapping[str, tuple[str, str]] = {}  # Detectron2's names: the two parts of the form
    image_subfolder = ""  # of a source's root
    crowds = False  # whether difficult objects are groups, which are not trained on

    def read(self, files: Files) -> AnnotatedSet:
        """Read annotation files; note problems instead of stopping at them."""
        raise NotImplementedError

    def refusal(self, path: Path) -> str:
        """Return why a file with the suffix is not an annotation, or nothing if it is one."""
        return ""

    def is_damaged(self, path: Path, image_names: set[str]) -> bool:
        """Return whether a file that is refused was meant to be an annotation of one of the images.

        It is then reported, or else its image would be unlabeled in silence.
        """
        return False

    # What follows is about whole sets that a config names.

    def source(self, first: str, last: str, root: Path = Path()) -> Source:
        """Return what the two parts of a name stand for, relative to a root."""
        return Source("", self.name, root / last, annotations=root / first)

    def read_set(
        self,
        source: Source,
        class_names: Sequence[str] | None,
        with_images: bool,
        with_masks: bool,
    ) -> AnnotatedSet:
        """Read a set with the given class list, or else its own."""
        try:
            assert source.annotations is not None
            images = {n: path for n, path in list_files(source.root).items() if is_image(n)}
            found = list_files(source.annotations)
        except KsclError as error:
            problem = Problem("layout", source.name, str(error), "Correct the name of the set")
            return AnnotatedSet(source.name, tuple(class_names or ()), problems=[problem])
        names = {PurePosixPath(name).stem for name in images}
        annotations = {
            name: path
            for name, path in found.items()
            if path.name.lower().endswith(self.suffix)
            and path.name not in self.companions
            and (not self.refusal(path) or self.is_damaged(path, names))
        }
        read = read_files(self, Files(source.root, images, source.annotations, annotations))
        classes = check_class_names(class_names or read.class_names, source.name)
        problems = read.problems
        for index, image in enumerate(read.images):
            unknown = [thing for thing in image.objects if thing.name not in classes]
            problems += [class_problem(o.name, classes, image.annotation) for o in unknown]
            known = tuple(thing for thing in image.objects if thing.name in classes)
            read.images[index] = replace(image, objects=known)
        if not read.images:
            what, fix = "no image has an annotation", "Check the two folders"
            problems.append(Problem("empty split", source.name, what, fix))
        return AnnotatedSet(source.name, classes, read.images, one_line_per_class(problems))

    def class_names(self, source: Source) -> tuple[str, ...]:
        """Return the class list of a set; raise KsclError if there is none."""
        found = self.read_set(source, None, True, False)
        return found.class_names or found.checked().class_names

    def has_class_list(self, source: Source) -> bool:
        """Return whether the classes are listed, not just met in the annotations."""
        return True


ANNOTATION_FORMATS: Registry[AnnotationFormat] = Registry(
    "annotation format",
    {
        module.name: f"{kscl.data.annotated.__name__}.{module.name}"
        for module in pkgutil.iter_modules(kscl.data.annotated.__path__)
    },
)
Kind = TypeVar("Kind", bound=type[AnnotationFormat])


def annotation_format(kind: Kind) -> Kind:
    """Register a format under its name; a decorator."""
    ANNOTATION_FORMATS.register(kind.name, kind())
    return kind


def read_files(form: AnnotationFormat, files: Files) -> AnnotatedSet:
    """Read annotation files; an image that is annotated twice is a problem.

    An image without an id gets the path below its folder.
    """
    found = form.read(files)
    kept: dict[Path, AnnotatedImage] = {}
    for image in found.images:
        assert image.path is not None
        first = kept.get(image.path.resolve())
        if first is None:
            image_id = image.id or os.path.relpath(image.path, files.image_root)
            kept[image.path.resolve()] = replace(image, id=image_id)
        else:
            what = f"is annotated twice: in {first.annotation} and in {image.annotation}"
            fix = "Remove one of the annotations"
            found.problems.append(Problem("duplicate annotation", str(image.path), what, fix))
    found.images = sorted(kept.values(), key=lambda image: str(image.path))
    return found


def forms() -> str:
    """Return how a data set can be named."""
    known = (each.form or f"{each.name}:ANNOTATIONS:IMAGES" for each in ANNOTATION_FORMATS.values())
    return f"{', '.join(known)} or a name such as voc_2007_test"


def is_set_name(name: str) -> bool:
    """Return whether a name has the form of an annotated set, or is one of Detectron2's."""
    known = ANNOTATION_FORMATS
    return name.partition(":")[0] in known or any(name in each.official for each in known.values())


def parse_source(name: str) -> Source:
    """Return what a name in DATASETS.TRAIN or DATASETS.TEST stands for."""
    known = ANNOTATION_FORMATS
    prefix, _, rest = name.partition(":")
    first, _, last = (os.path.expanduser(part) for part in rest.rpartition(":"))
    if prefix in known and first and last:
        return replace(known[prefix].source(first, last), name=name)
    root = Path(os.path.expanduser(os.getenv(DATASETS_VARIABLE, "datasets")))
    for each in known.values():
        if name in each.official:
            return replace(each.source(*each.official[name], root), name=name, official=True)
    near = difflib.get_close_matches(name, [n for each in known.values() for n in each.official], 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise KsclError(f"'{name}' is not a data set.{hint} Write {forms()}.")


def read_source(
    source: Source,
    class_names: Sequence[str] | None = None,
    with_images: bool = True,
    with_masks: bool = False,
) -> AnnotatedSet:
    """Read a set; what is wrong with a public benchmark's boxes or masks is noted, not refused.

    Without `with_images`, formats that do not need the images look only at the annotations.
    """
    found = ANNOTATION_FORMATS[source.format].read_set(source, class_names, with_images, with_masks)
    if source.official:
        found.problems = [
            replace(problem, fatal=False) if problem.kind in QUIRKS else problem
            for problem in found.problems
        ]
    return found


def shared_class_names(sources: Sequence[Source]) -> tuple[str, ...]:
    """Return one class list for several training sets; raise KsclError if theirs disagree."""
    known = ANNOTATION_FORMATS
    lists = {source.name: known[source.format].class_names(source) for source in sources}
    if len(set(lists.values())) == 1:
        return next(iter(lists.values()))
    if not any(known[source.format].has_class_list(source) for source in sources):
        return tuple(sorted({name for names in lists.values() for name in names}))
    listed = "\n".join(f"  {name}: {', '.join(names[:20])}" for name, names in lists.items())
    raise KsclError(
        f"The training sets have different class lists:\n{listed}\nGive the list to use by name."
    )
