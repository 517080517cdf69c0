"""Annotated images, the problems found in them, and the formats they come in.

A format is one file of kscl/data/annotated, or any other module that is imported: a class with
`@annotation_format`. Own data, training, scoring, probes and preflight go through the registry.
A set is named `voc:FOLDER:SPLIT`, `coco:FILE.json:IMAGES`, …; Detectron2's names
(voc_2007_trainval, coco_2017_val, …) lie below $DETECTRON2_DATASETS. Nothing here needs Detectron2.

Boxes are (x1, y1, x2, y2) in 0-based coordinates, as Detectron2 has them: a box over a whole image
is (0, 0, width, height), whatever the file counts from. Readers note problems and continue, so
that all are reported at once.
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
from typing import NamedTuple, TypeVar

import kscl.data.annotated
from kscl.data.formats import CONVERT, UnreadableImage, is_image, open_image
from kscl.data.masks import Mask, Polygons, RunLengths, extent
from kscl.data.source import Walk, open_regular, walk_files
from kscl.errors import KsclError, printable
from kscl.registry import Registry

DATASETS_VARIABLE = "DETECTRON2_DATASETS"
SHOWN_PER_KIND = 20  # on screen; `Problem`s are all kept
SHOWN_CHARACTERS = 500  # of each part of a problem: a file may have anything in place of a name
MAX_SIDE = 2**31  # pixels; a larger number is not a size
UNREADABLE = "unreadable annotation"  # a kind of problem
# Kinds of problems that public benchmarks have; everyone trains and scores with them.
QUIRKS = (
    "degenerate box",
    "box outside",
    "degenerate mask",
    "mask outside",
    "mask beside its box",
)

Box = tuple[float, float, float, float]
Classes = Sequence[str] | None


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


def list_problems(problems: Iterable[Problem]) -> str:
    """Write one line per problem, grouped by kind; the rest of a frequent kind is counted."""
    by_kind: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        by_kind[problem.kind].append(problem)
    lines = []
    for kind, found in by_kind.items():
        lines += [f"  [{kind}] {problem}" for problem in found[:SHOWN_PER_KIND]]
        if len(found) > SHOWN_PER_KIND:
            lines.append(f"  [{kind}] … and {len(found) - SHOWN_PER_KIND} more like these")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class AnnotatedObject:
    """One object; the defaults are those that VOC files without the tag are read with."""

    name: str
    box: Box
    difficult: bool = False  # in COCO files: a crowd
    truncated: bool = False
    pose: str = "Unspecified"
    area: float | None = None  # of the mask where the file has one, else of the box
    mask: Mask | None = None  # if the file has one and masks were requested


@dataclass(frozen=True, slots=True)
class AnnotatedImage:
    """One image and the objects in it."""

    id: str
    path: Path | None
    width: int
    height: int
    objects: tuple[AnnotatedObject, ...]
    annotation: str  # the annotation file, for messages


@dataclass
class AnnotatedSet:
    """One split of a data set, read whole: what is good in it, and every problem of the rest."""

    name: str
    class_names: tuple[str, ...]
    images: list[AnnotatedImage] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    # By class that is not in the list: the index of its problem, its text, and a count.
    _unknown: dict[str, tuple[int, str, int]] = field(default_factory=dict, repr=False)

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
        fatal = [problem for problem in self.problems if problem.fatal]
        if fatal:
            raise KsclError(f"{self.name} cannot be used:\n{list_problems(fatal)}")
        return self

    def note(self, kind: str, where: object, what: object, fix: str, fatal: bool = True) -> None:
        """Add a problem."""
        self.problems.append(Problem(kind, str(where), str(what), fix, fatal))

    def add_image(
        self,
        path: Path | None,
        size: tuple[int, int],
        objects: Iterable[tuple[AnnotatedObject, str]],
        annotation: str | Path,
        image_id: str = "",
    ) -> None:
        """Add an image with its usable objects, and note what is wrong with the others.

        `size` is (width, height), or (0, 0) if it is not known. Each object comes with the words
        that identify it in a message. Without an id, the image gets the path below its folder.
        """
        where, kept = str(annotation), []
        for thing, what in objects:
            if self.knows(thing.name, where):
                self.problems += _box_problems(thing.box, *size, where, what)
                if thing.mask is not None:
                    self.problems += _mask_problems(thing.mask, thing.box, *size, where, what)
                x1, y1, x2, y2 = thing.box
                if x1 <= x2 and y1 <= y2:  # a benchmark's box without area can be kept
                    kept.append(thing)
        self.images.append(AnnotatedImage(image_id, path, *size, tuple(kept), where))

    def knows(self, name: str, where: str) -> bool:
        """Return whether a class is in the list; if not, note it once, with a count of objects."""
        if name in self.class_names:
            return True
        if name not in self._unknown:
            self.problems.append(_class_problem(name, self.class_names, where))
            self._unknown[name] = len(self.problems) - 1, self.problems[-1].what, 0
        index, what, count = self._unknown[name]
        text = f"{what} ({count + 1} object{'s' if count else ''})"
        self.problems[index] = replace(self.problems[index], what=text)
        self._unknown[name] = index, what, count + 1
        return False


def _class_problem(name: str, classes: Sequence[str], where: str) -> Problem:
    in_case = [other for other in classes if other.casefold() == name.casefold()]
    if in_case:
        what = f"the class '{name}' differs from '{in_case[0]}' in upper and lower case"
        fix = "Correct it, or let kscl prepare own --merge-case do it"
        return Problem("case of a class", where, what, fix)
    near = difflib.get_close_matches(name, classes, 1, cutoff=0.7)
    fix = f"Did you mean '{near[0]}'? Correct it" if near else "Correct the name"
    fix += f", or add it to the class list ({', '.join(classes[:20])})"
    return Problem("unknown class", where, f"the class '{name}' is not in the list", fix)


def _box_problems(box: Box, width: int, height: int, where: str, what: str) -> Iterator[Problem]:
    x1, y1, x2, y2 = box
    if not (x1 < x2 and y1 < y2):
        fix = "Correct it so that the maxima are above the minima, or delete the object"
        yield Problem("degenerate box", where, f"{what} has no area", fix)
        return
    outside = max(-x1, -y1, x2 - width, y2 - height) if width and height else 0
    # Files that count from 0 instead of 1 are one pixel off; Detectron2 clips that in training.
    if outside > 1:
        fix = "Correct the box, or the size if it belongs to another image"
        text = f"{what} is {outside:g} pixels outside its {width} x {height} image"
        yield Problem("box outside", where, text, fix)
    elif outside > 0:
        fix = "It is clipped in training; VOC counts pixels from 1, perhaps this file from 0"
        text = f"{what} is up to a pixel outside its {width} x {height} image"
        yield Problem("box at the border", where, text, fix, fatal=False)
    if min(x2 - x1, y2 - y1) <= 1:
        fix = "It is used as it is; delete the object if it was a slip of the mouse"
        yield Problem("tiny box", where, f"{what} is one pixel wide or high", fix, fatal=False)


def _mask_problems(
    mask: Mask, box: Box, width: int, height: int, where: str, what: str
) -> Iterator[Problem]:
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


def check_class_names(names: Sequence[str], where: object) -> tuple[str, ...]:
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


def leads_out(name: str) -> bool:
    """Return whether a relative name from a file would reach beyond the data set's folder."""
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or "\0" in name


_ORIENTATION = 0x0112  # the EXIF tag
_TURNED = (5, 6, 7, 8)  # orientations that swap width and height
_DEEP_MODES = ("I", "F")  # of 16 and 32 bits per pixel, "I;16" too


def image_size(path: Path, decode: bool = False) -> tuple[int, int]:
    """Return (width, height) after the EXIF turn that Detectron2 makes; `decode` reads all pixels.

    Raise UnreadableImage for a file that cannot be used.
    """
    try:
        with open_regular(path) as file, open_image(file) as image:
            width, height = image.size
            # Look in `info` first: getexif() would decode a whole PNG to find none.
            exif = image.getexif() if "exif" in image.info else {}
            if image.mode.split(";")[0] in _DEEP_MODES:
                raise UnreadableImage(
                    "it has more than 8 bits per pixel, which turn white when read as RGB "
                    f"(mode {image.mode})",
                    CONVERT,
                )
            if decode:
                image.load()
    except OSError as error:
        raise UnreadableImage(error.strerror or str(error), "Make it readable") from error
    return (height, width) if exif.get(_ORIENTATION) in _TURNED else (width, height)


def unreadable_image(path: Path, error: UnreadableImage) -> Problem:
    """Return the problem of an image that `image_size` refuses."""
    fix = f"{error.fix}, or remove it"
    return Problem("unreadable image", str(path), f"cannot be read: {error}", fix)


def image_problem(
    path: Path,
    annotated: tuple[int, int] | None,
    decode: bool = True,
    annotation: str = "its annotation",
) -> Problem | None:
    """Return what is wrong with an image, also if its (width, height) is not the annotated one."""
    try:
        size = image_size(path, decode)
    except UnreadableImage as error:
        return unreadable_image(path, error)
    if annotated is None or annotated == size:
        return None
    width, height = annotated
    what = f"is {size[0]} x {size[1]} pixels (as it is shown, turned by its EXIF tag if it has one)"
    what += f", but {annotation} says {width} x {height}"
    fix = "Correct the size there if the boxes fit the image, otherwise annotate it again"
    return Problem("image size", str(path), what, fix)


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
    def truth(self) -> Path:
        """The file or folder of annotations."""
        return self.annotations or self.root

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

    def image_of(self, name: str, found: AnnotatedSet, also: Sequence[str] = ()) -> Path | None:
        """Return the image with the name of an annotation file or one of `also`, or note why."""
        path, pure = self.annotations[name], PurePosixPath(name)
        try:
            image = self.find([str(pure.with_suffix("")), pure.stem, *filter(None, also)])
        except KsclError as error:
            fix = "Give the annotation the path or the name of its image"
            found.note("ambiguous image", path, error, fix)
            return None
        if image is None:
            fix = "Add the image, or remove the annotation"
            found.note("missing image", path, "no image has its name", fix)
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


class Refusal(NamedTuple):
    """Why a file is not an annotation.

    A damaged one was meant to be an annotation of one of the images. It is reported; otherwise its
    image would be unlabeled without a word.
    """

    reason: str
    damaged: bool


class AnnotationFormat:
    """How annotations of one format are recognized and read.

    A format must have `name`, `files`, `suffix` and `read`. With these alone, data in it can be
    prepared (kscl prepare own) and used in configs as `NAME:ANNOTATIONS:IMAGES`.
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

    def refusal(self, path: Path, image_names: set[str]) -> Refusal | None:
        """Return why a file with the suffix is not an annotation, or None if it is one."""
        return None

    # Whole sets, as a config names them.

    def source(self, first: str, last: str, root: Path = Path()) -> Source:
        """Return what the two parts of a name stand for, relative to a root."""
        return Source("", self.name, root / last, annotations=root / first)

    def read_set(self, source: Source, classes: Classes, images: bool, masks: bool) -> AnnotatedSet:
        """Read a set with the given class list, or else its own.

        A format that does not need the images looks for them only if `images` is true, and keeps
        masks only if `masks` is.
        """
        try:
            pictures = {n: path for n, path in list_files(source.root).items() if is_image(n)}
            files = list_files(source.truth)
        except KsclError as error:
            problem = Problem("layout", source.name, str(error), "Correct the name of the set")
            return AnnotatedSet(source.name, tuple(classes or ()), problems=[problem])
        names = {PurePosixPath(name).stem for name in pictures}
        annotations = {
            name: path
            for name, path in files.items()
            if path.name.lower().endswith(self.suffix)
            and path.name not in self.companions
            and ((refusal := self.refusal(path, names)) is None or refusal.damaged)
        }
        read = read_files(self, Files(source.root, pictures, source.truth, annotations))
        found = AnnotatedSet(source.name, tuple(classes or read.class_names), [], read.problems)
        if not read.images:
            what, fix = "no image has an annotation", "Check the two folders"
            found.note("empty split", source.name, what, fix)
            return found
        check_class_names(found.class_names, source.name)
        for image in read.images:
            known = tuple(o for o in image.objects if found.knows(o.name, image.annotation))
            found.images.append(replace(image, objects=known))
        return found

    def class_names(self, source: Source) -> tuple[str, ...]:
        """Return the class list of a set; raise KsclError if there is none."""
        found = self.read_set(source, None, True, False)
        return found.class_names or found.checked().class_names

    def has_class_list(self, source: Source) -> bool:
        """Return whether the classes are listed, not just collected from the annotations."""
        return True


# The modules of kscl/data/annotated are named like their formats.
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
    """Read annotation files; an image that is annotated twice is a problem."""
    found = form.read(files)
    kept: dict[Path, AnnotatedImage] = {}
    for image in found.images:
        assert image.path is not None
        image_id = image.id or os.path.relpath(image.path, files.image_root)
        new = replace(image, id=image_id)
        first = kept.setdefault(image.path.resolve(), new)
        if first is not new:
            what = f"is annotated twice: in {first.annotation} and in {image.annotation}"
            found.note("duplicate annotation", image.path, what, "Remove one of the annotations")
    found.images = sorted(kept.values(), key=lambda image: str(image.path))
    return found


def forms() -> str:
    """Return how a data set can be named."""
    known = ANNOTATION_FORMATS.values()
    written = (each.form or f"{each.name}:ANNOTATIONS:IMAGES" for each in known)
    return f"{', '.join(written)} or a name such as voc_2007_test"


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
    official = {each: form for form in known.values() for each in form.official}
    if name in official:
        source = official[name].source(*official[name].official[name], root)
        return replace(source, name=name, official=True)
    near = difflib.get_close_matches(name, official, 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise KsclError(f"'{name}' is not a data set.{hint} Write {forms()}.")


def read_source(
    source: Source, class_names: Classes = None, with_images: bool = True, with_masks: bool = False
) -> AnnotatedSet:
    """Read a set; what is wrong with a public benchmark's boxes or masks is noted, not refused."""
    form = ANNOTATION_FORMATS[source.format]
    found = form.read_set(source, class_names, with_images, with_masks)
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
