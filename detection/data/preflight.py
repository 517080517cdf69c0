"""Check data before training for everything that would stop a run hours later.

All problems of all sets are reported at once, each with its file and fix. Notes (e.g. a class
without test objects) are reported too, but stop nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from kscl.data.annotations import (
    AnnotatedSet,
    Problem,
    Source,
    check_class_names,
    image_problem,
    list_problems,
    parse_source,
    read_source,
    shared_class_names,
)
from kscl.data.formats import DECODED_SAMPLE
from kscl.data.masks import RunLengths
from kscl.data.source import equal_files
from kscl.errors import KsclError

MAX_BAD_FRACTION = 0.01  # of a training set, as in pretraining; a run has KSCL.MAX_BAD_FRACTION
UNREADABLE = "unreadable image"
Part = tuple[Source, AnnotatedSet]
THREADS = 8  # reading headers mostly waits for the disk


@dataclass
class Report:
    """What was found; `problems` has notes too, which are not fatal."""

    class_names: tuple[str, ...] = ()
    sets: list[dict[str, Any]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    absent_from_test: tuple[str, ...] = ()
    # Unreadable training images, few enough to skip → reason.
    skipped: dict[str, str] = field(default_factory=dict, repr=False)
    # The sets by role, for the run that follows.
    annotated: dict[str, list[Part]] = field(
        default_factory=lambda: {"train": [], "test": []}, repr=False
    )

    def add(self, kind: str, where: str, what: str, fix: str, *, fatal: bool = True) -> None:
        """Note a problem."""
        self.problems.append(Problem(kind, where, what, fix, fatal))

    @property
    def fatal(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.fatal]

    @property
    def notes(self) -> list[Problem]:
        return [problem for problem in self.problems if not problem.fatal]

    def checked(self) -> Report:
        """Return this report, or raise one error with every problem."""
        if self.fatal:
            count = len(self.fatal)
            raise KsclError(
                f"Preflight found {count} problem{'s' if count > 1 else ''} in the data; nothing "
                f"was started:\n{list_problems(self.fatal)}"
            )
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the sets themselves, for JSON."""
        return {
            "class_names": self.class_names,
            "sets": self.sets,
            "problems": [vars(problem) for problem in self.problems],
            "absent_from_test": self.absent_from_test,
            "good": not self.fatal,
        }

    def __str__(self) -> str:
        lines = [f"Classes ({len(self.class_names)}): {', '.join(self.class_names)}"]
        for row in self.sets:
            is_whole = row["decoded"] == row["images"] + row["skipped"]
            decoded = "all decoded" if is_whole else f"a sample of {row['decoded']} decoded"
            lines.append(
                f"{row['role']:>5}  {row['name']}: {row['images']} images, {row['objects']} objects"
                f" ({row['difficult']} difficult), {decoded}"
            )
        if self.notes:
            lines.append(f"Notes ({len(self.notes)}):\n{list_problems(self.notes)}")
        if self.fatal:
            lines.append(f"Problems ({len(self.fatal)}):\n{list_problems(self.fatal)}")
        else:
            lines.append("No problem found.")
        return "\n".join(lines)


def preflight(
    train: Sequence[str | Source],
    test: Sequence[str | Source],
    class_names: Sequence[str] | None = None,
    num_classes: int | None = None,
    full: bool = False,
    sample: int = DECODED_SAMPLE,
    mask_format: str = "",
    classes_key: str = "MODEL.ROI_HEADS.NUM_CLASSES",
    max_bad_fraction: float = MAX_BAD_FRACTION,
) -> Report:
    """Check every set (see kscl.data.annotations for names); `full` decodes every image.

    `num_classes` is the model's, from `classes_key`; without `class_names`, the training sets give
    the list. With a `mask_format` (Detectron2's `polygon` or `bitmask`), every object must have a
    mask in it. Up to `max_bad_fraction` of the images of a training set may be unreadable: they
    are noted and skipped.
    """
    report = Report()
    sources: list[tuple[str, Source]] = []
    for role, names in (("train", train), ("test", test)):
        for name in names:
            try:
                sources.append((role, parse_source(name) if isinstance(name, str) else name))
            except KsclError as error:
                report.add("data set", str(name), str(error), "Correct the name")
    report.class_names, no_list = _class_names(sources, class_names)
    sets = report.annotated
    for role, source in sources:
        try:
            found = read_source(source, report.class_names or None, with_masks=bool(mask_format))
        except KsclError as error:
            report.add("class list", source.name, str(error), "Correct the annotations")
            continue
        report.problems += found.problems
        if mask_format:
            report.problems += _mask_problems(role, found, mask_format)
        allowed = max_bad_fraction if role == "train" else 0.0  # a score counts all test images
        listed = len(found.images)
        decoded = _check_images(source, found, report, full, sample, allowed)
        sets[role].append((source, found))
        report.sets.append(_summary(role, found, decoded, listed - len(found.images)))
    # Other problems of the files explain a missing list.
    if no_list and (class_names is not None or not report.fatal):
        report.add("class list", "the training sets", no_list, "Give one list for all")
    _check_classes(report, sets, num_classes, classes_key)
    report.problems += _overlap(sets["train"], sets["test"])
    return report


def _class_names(
    sources: list[tuple[str, Source]], given: Sequence[str] | None
) -> tuple[tuple[str, ...], str]:
    """Return the list for all sets, or an empty one and the reason."""
    deciding = [source for role, source in sources if role == "train"]
    deciding = deciding or [source for _, source in sources]  # test sets alone have their own
    try:
        if given is not None:
            return check_class_names(given, "the class list"), ""
        return (shared_class_names(deciding) if deciding else ()), ""
    except KsclError as error:
        return (), str(error)


def _mask_problems(role: str, found: AnnotatedSet, mask_format: str) -> Iterator[Problem]:
    """Yield what prevents training or scoring masks on a set."""
    # Crowds are not trained on, but scoring needs their pixels to ignore them.
    objects = [(image, thing) for image in found.images for thing in image.objects]
    without = [image for image, thing in objects if thing.mask is None]
    if without:
        what = f"{len(without)} of {len(objects)} objects have no mask (image {without[0].id})"
        fix = "Add them as `segmentation` to a COCO file, or set MODEL.MASK_ON False"
        yield Problem("missing mask", found.name, what, fix)
    runs = [
        image
        for image, thing in objects
        if isinstance(thing.mask, RunLengths) and not thing.difficult
    ]
    if role == "train" and mask_format == "polygon" and runs:
        what = f"{len(runs)} masks are run lengths (image {runs[0].id})"
        fix = "INPUT.MASK_FORMAT polygon cannot train on them: set it to bitmask"
        yield Problem("mask format", found.name, what, fix)


def _check_images(
    source: Source, found: AnnotatedSet, report: Report, full: bool, sample: int, allowed: float
) -> int:
    """Check the headers of all images and decode a fixed sample; return the number decoded."""
    images = found.images
    indices = range(len(images))
    decoded = (
        set(indices) if full else set(random.Random(0).sample(indices, min(sample, len(images))))
    )
    known = {problem.where for problem in found.problems}
    with ThreadPoolExecutor(THREADS) as threads:
        paths = [image.path for image in images if image.path is not None]
        sizes = [(image.width, image.height) for image in images]
        says = [image.annotation for image in images]
        results = threads.map(image_problem, paths, sizes, (i in decoded for i in indices), says)
        problems = [p for p in results if p is not None and p.where not in known]
    bad = {p.where: p.what for p in problems if p.kind == UNREADABLE}
    if len(bad) <= allowed * len(images):
        fix = "It is skipped in training"
        problems = [replace(p, fatal=False, fix=fix) if p.where in bad else p for p in problems]
        found.images = [image for image in images if str(image.path) not in bad]
        report.skipped |= bad
    report.problems += problems
    empty = sum(not image.objects for image in images)
    if not found.usable:  # objects may be missing, as reported above
        return len(decoded)
    if images and empty == len(images):
        report.add("no objects", source.name, "no image has an object", "Annotate some")
    elif empty:
        text = f"{empty} of {len(images)} images have no object"
        fix = "Training skips them, testing keeps them"
        report.add("without objects", source.name, text, fix, fatal=False)
    return len(decoded)


def _check_classes(
    report: Report,
    sets: dict[str, list[Part]],
    num_classes: int | None,
    classes_key: str,
) -> None:
    names = report.class_names
    if num_classes is not None and names and num_classes != len(names):
        what = f"is {num_classes}, but there are {len(names)} classes ({', '.join(names[:20])})"
        why = "With fewer, a class is trained as background" if num_classes < len(names) else ""
        fix = f"{why or 'With more, outputs are wasted'}: set it to {len(names)}"
        report.add("class count", classes_key, what, fix)
    by_case: dict[str, list[str]] = {}
    for name in names:
        by_case.setdefault(name.casefold(), []).append(name)
    for alike in (found for found in by_case.values() if len(found) > 1):
        where = " and ".join(_place(name, [*sets["train"], *sets["test"]]) for name in alike)
        fix = "Give them one name, or let kscl prepare own --merge-case do it"
        report.add("case of a class", where, "differ only in upper and lower case", fix)
    for role, found in sets.items():
        if not names or not found or not all(annotated.usable for _, annotated in found):
            continue
        counts = [annotated.counts() for _, annotated in found]
        absent = [name for name in names if not any(count.get(name) for count in counts)]
        if role == "train":
            fix = "It cannot be learned; add objects or remove the class from the list"
        else:
            report.absent_from_test = tuple(absent)
            fix = "It is left out of the mean AP, not counted as 0"
        if absent:
            listed = ", ".join(f"'{name}'" for name in absent)
            text = f"no {role}ing object is of the class {listed} (difficult ones do not count)"
            where = ", ".join(source.name for source, _ in found)
            report.add("absent class", where, text, fix, fatal=False)
        if role == "test" and len(absent) == len(names):
            where = ", ".join(source.name for source, _ in found)
            report.add("absent class", where, "there is nothing to find", "Name another test set")


def _place(name: str, sets: list[Part]) -> str:
    """Return a class with the first annotation file that has it."""
    for source, annotated in sets:
        for image in annotated.images:
            if any(thing.name == name for thing in image.objects):
                return f"'{name}' in {image.annotation} of {source.name}"
    return f"'{name}' in the class list of {', '.join(source.name for source, _ in sets)}"


def _overlap(train: list[Part], test: list[Part]) -> Iterator[Problem]:
    """Yield test images that are trained on: the same file, or one with equal content."""
    fix = "Remove it from one of the splits: a score on training images is meaningless"
    for test_source, test_set in test:
        for train_source, train_set in train:
            paths = [
                [image.path for image in annotated.images if image.path is not None]
                for annotated in (train_set, test_set)
            ]
            known = {path.resolve() for path in paths[0]}
            official = test_source.official and train_source.official
            for path in paths[1]:
                if path.resolve() in known:
                    what = f"is in {test_set.name} and in {train_set.name}"
                    yield Problem("overlap", str(path), what, fix)
            others = [path for path in paths[1] if path.resolve() not in known]
            for same, path in equal_files(paths[0], others):
                what = f"of {test_set.name} has the same content as {same} of {train_set.name}"
                problem = Problem("overlap", str(path), what, fix)
                # A benchmark's own duplicates are part of it.
                yield replace(problem, fatal=not official)


def _summary(role: str, found: AnnotatedSet, decoded: int, skipped: int) -> dict[str, Any]:
    objects = [thing for image in found.images for thing in image.objects]
    return {
        "role": role,
        "name": found.name,
        "images": len(found.images),
        "objects": len(objects),
        "difficult": sum(thing.difficult for thing in objects),
        "per_class": found.counts(),
        "decoded": decoded,  # of these and of those that are skipped
        "skipped": skipped,
    }
