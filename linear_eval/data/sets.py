"""The data of an evaluation by role: of one set, or of every set of a linear suite."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fvcore.common.config import CfgNode

from kscl.data.annotated.specs import parse_source, shared_class_names
from kscl.runtime.processes.ranks import on_first_rank
from linear_eval.data.annotated import open_annotated
from linear_eval.data.images import LabeledImages, check_same_classes, open_class_folders
from linear_eval.errors import LinearEvalError

PARTS = ("train", "val", "test")
Data = dict[str, LabeledImages]


def open_suite(cfg: CfgNode) -> Data:
    """Open every set of SETS as SET/train, SET/val (if it has one) and SET/test.

    Before anything is opened, raise one error that names all sets that are not there.
    """
    missing = [
        f"\n  SETS.{name}.{part}: {where}"
        for name, given in cfg.SETS.items()
        for part, where in given.items()
        if part in PARTS and where and not os.path.isdir(_folder(where))
    ]
    if missing:
        raise LinearEvalError(
            f"Sets of the suite are not there: {''.join(missing)}\nPut them there, name other "
            "folders, or take a set off the list with SETS.NAME {} to leave it out."
        )
    found: Data = {}
    for name, given in cfg.SETS.items():
        if given:
            found |= _open_set(name, given, cfg)
    return found


def is_annotated(where: str) -> bool:
    """Tell an annotated set (voc:FOLDER:SPLIT and the like) from a folder."""
    return ":" in where or where.startswith(("voc_", "coco_"))


def _folder(where: str) -> str:
    return str(parse_source(where).root) if is_annotated(where) else where


def _open_set(name: str, given: Mapping[str, str], cfg: CfgNode) -> Data:
    parts = [part for part in PARTS if given.get(part)]
    if is_annotated(given["train"]):
        classes = on_first_rank(lambda: shared_class_names([parse_source(given["train"])]))
        return {f"{name}/{part}": open_annotated(given[part], classes, cfg) for part in parts}
    opened = {part: open_class_folders(f"SETS.{name}.{part}", given[part], cfg) for part in parts}
    for part in parts[1:]:
        check_same_classes(opened["train"], opened[part])
    return {f"{name}/{part}": images for part, images in opened.items()}
