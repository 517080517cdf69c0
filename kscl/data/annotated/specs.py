"""Data sets by name: `voc:FOLDER:SPLIT`, `coco:FILE.json:IMAGES`, or Detectron2's own names.

Detectron2's names (voc_2007_trainval, coco_2017_val, …) lie below $DETECTRON2_DATASETS, as its
documentation has it. Nothing here needs Detectron2.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kscl.data.annotated.annotations import AnnotatedSet
from kscl.data.annotated.coco import read_category_names, read_coco
from kscl.data.annotated.voc import CLASSES_FILE, VOC_CLASSES, found_class_names, read_voc
from kscl.data.annotated.voc_files import check_layout
from kscl.errors import KsclError

DATASETS_VARIABLE = "DETECTRON2_DATASETS"
FORMS = "voc:FOLDER:SPLIT, coco:FILE.json:IMAGE_FOLDER or a name such as voc_2007_test"

# What public benchmarks have, and everyone trains and scores with.
QUIRKS = (
    "degenerate box",
    "box outside",
    "degenerate mask",
    "mask outside",
    "mask beside its box",
)

VOC_NAMES = {
    f"voc_{year}_{split}": (f"VOC{year}", split)
    for year in (2007, 2012)
    for split in ("trainval", "train", "val", "test")
    if (year, split) != (2012, "test")  # its annotations were never published
}
COCO_NAMES = {
    "coco_2014_train": ("train2014", "instances_train2014"),
    "coco_2014_val": ("val2014", "instances_val2014"),
    "coco_2014_minival": ("val2014", "instances_minival2014"),
    "coco_2014_valminusminival": ("val2014", "instances_valminusminival2014"),
    "coco_2017_train": ("train2017", "instances_train2017"),
    "coco_2017_val": ("val2017", "instances_val2017"),
    "coco_2017_val_100": ("val2017", "instances_val2017_100"),
}
OFFICIAL_NAMES = (*VOC_NAMES, *COCO_NAMES)


@dataclass(frozen=True)
class Source:
    """Where a data set is, and in which layout."""

    name: str  # as the config has it
    root: Path  # the VOC folder, or the folder of images of a COCO file
    split: str = ""  # VOC only
    json_file: Path | None = None  # COCO only
    official: bool = False  # a public benchmark: its quirks are part of it, and reported as notes

    @property
    def is_voc(self) -> bool:
        """Whether it has the layout of Pascal VOC."""
        return self.json_file is None


def parse_source(name: str) -> Source:
    """Return what a name in DATASETS.TRAIN or DATASETS.TEST stands for."""
    layout, _, rest = name.partition(":")
    first, _, last = rest.rpartition(":")
    if layout == "voc" and first and last:
        return Source(name, _path(first), split=last)
    if layout == "coco" and first and last:
        return Source(name, _path(last), json_file=_path(first))
    root = _path(os.getenv(DATASETS_VARIABLE, "datasets"))
    if name in VOC_NAMES:
        folder, split = VOC_NAMES[name]
        return Source(name, root / folder, split=split, official=True)
    if name in COCO_NAMES:
        images, annotations = COCO_NAMES[name]
        json_file = root / "coco" / "annotations" / f"{annotations}.json"
        return Source(name, root / "coco" / images, json_file=json_file, official=True)
    near = difflib.get_close_matches(name, OFFICIAL_NAMES, 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise KsclError(f"'{name}' is not a data set.{hint} Write {FORMS}.")


def _path(text: str) -> Path:
    return Path(os.path.expanduser(text))  # Path's own raises for a user who is not known


def read_source(
    source: Source,
    class_names: Sequence[str] | None = None,
    with_images: bool = True,
    with_masks: bool = False,
) -> AnnotatedSet:
    """Read a set; what is wrong with a public benchmark's boxes or masks is noted, not refused."""
    classes = class_names or default_class_names(source)
    if source.json_file is None:
        found = read_voc(
            source.root, source.split, classes, name=source.name, with_images=with_images
        )
    else:
        images = source.root if with_images else None
        found = read_coco(
            source.json_file, images, classes, name=source.name, with_masks=with_masks
        )
    if source.official:
        found.problems = [
            replace(problem, fatal=False) if problem.kind in QUIRKS else problem
            for problem in found.problems
        ]
    return found


def default_class_names(source: Source) -> tuple[str, ...] | None:
    """Return the list to use if none is given: VOC's own 20, or None for what the files have."""
    return VOC_CLASSES if source.official and source.is_voc else None


def shared_class_names(sources: Sequence[Source]) -> tuple[str, ...]:
    """Return one class list for several training sets; raise KsclError if theirs disagree."""
    lists = {source.name: _own_class_names(source) for source in sources}
    if len(set(lists.values())) == 1:
        return next(iter(lists.values()))
    if all(_is_found_in_xml(source) for source in sources):
        return tuple(sorted({name for names in lists.values() for name in names}))
    listed = "\n".join(f"  {name}: {', '.join(names[:20])}" for name, names in lists.items())
    raise KsclError(
        f"The training sets have different class lists:\n{listed}\nGive the list to use by name."
    )


def _own_class_names(source: Source) -> tuple[str, ...]:
    default = default_class_names(source)
    if default:
        return default
    if source.json_file is not None:
        return tuple(read_category_names(source.json_file).values())
    problems = check_layout(source.root, source.split)
    if problems:
        raise KsclError("\n".join(str(problem) for problem in problems))
    return found_class_names(source.root)


def _is_found_in_xml(source: Source) -> bool:
    listed = os.path.isfile(source.root / CLASSES_FILE)
    return source.is_voc and default_class_names(source) is None and not listed
