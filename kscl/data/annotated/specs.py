"""Annotation formats, and data sets by name: `voc:FOLDER:SPLIT`, `coco:FILE.json:IMAGES`, ….

A format is one file of this folder, or any other module that is imported: a class with
`@annotation_format`. Own data, training, scoring, probes and preflight go through this registry.
Detectron2's names (voc_2007_trainval, coco_2017_val, …) lie below $DETECTRON2_DATASETS, as its
documentation has it. Nothing here needs Detectron2.
"""

from __future__ import annotations

import difflib
import importlib
import os
import pkgutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import TypeVar

import kscl.data.annotated
from kscl.data.annotated.annotations import (
    AnnotatedImage,
    AnnotatedSet,
    Problem,
    check_class_names,
    class_problem,
    one_line_per_class,
)
from kscl.data.formats import is_image
from kscl.data.source import Walk, walk_files
from kscl.errors import KsclError

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
        return self.root / all_formats()[self.format].image_subfolder


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


_FORMATS: dict[str, AnnotationFormat] = {}
Kind = TypeVar("Kind", bound=type[AnnotationFormat])


def annotation_format(kind: Kind) -> Kind:
    """Register a format under its name; a decorator."""
    known = _FORMATS.get(kind.name)
    if known is not None and type(known).__qualname__ != kind.__qualname__:
        raise KsclError(f"The annotation format '{kind.name}' is registered twice. Rename one.")
    _FORMATS[kind.name] = kind()
    return kind


def all_formats() -> dict[str, AnnotationFormat]:
    """Return every format by name: those of this folder, and those registered elsewhere."""
    _load_formats()
    return _FORMATS


@cache
def _load_formats() -> None:
    for module in pkgutil.iter_modules(kscl.data.annotated.__path__):
        importlib.import_module(f"kscl.data.annotated.{module.name}")


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
    known = (each.form or f"{each.name}:ANNOTATIONS:IMAGES" for each in all_formats().values())
    return f"{', '.join(known)} or a name such as voc_2007_test"


def is_set_name(name: str) -> bool:
    """Return whether a name has the form of an annotated set, or is one of Detectron2's."""
    known = all_formats()
    return name.partition(":")[0] in known or any(name in each.official for each in known.values())


def parse_source(name: str) -> Source:
    """Return what a name in DATASETS.TRAIN or DATASETS.TEST stands for."""
    known = all_formats()
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
    found = all_formats()[source.format].read_set(source, class_names, with_images, with_masks)
    if source.official:
        found.problems = [
            replace(problem, fatal=False) if problem.kind in QUIRKS else problem
            for problem in found.problems
        ]
    return found


def shared_class_names(sources: Sequence[Source]) -> tuple[str, ...]:
    """Return one class list for several training sets; raise KsclError if theirs disagree."""
    known = all_formats()
    lists = {source.name: known[source.format].class_names(source) for source in sources}
    if len(set(lists.values())) == 1:
        return next(iter(lists.values()))
    if not any(known[source.format].has_class_list(source) for source in sources):
        return tuple(sorted({name for names in lists.values() for name in names}))
    listed = "\n".join(f"  {name}: {', '.join(names[:20])}" for name, names in lists.items())
    raise KsclError(
        f"The training sets have different class lists:\n{listed}\nGive the list to use by name."
    )
