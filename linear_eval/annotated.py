"""Images with several classes each, from the annotated sets that detectors are trained on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fvcore.common.config import CfgNode

from kscl.data.annotations import AnnotatedSet, forms, parse_source, read_source, shared_class_names
from kscl.data.open import FileSource
from kscl.data.source import Names
from kscl.errors import KsclError
from kscl.records.fingerprint import fingerprint
from kscl.runtime.distributed import on_first_rank
from linear_eval.images import LabeledImages

PRESENT, ABSENT, IGNORED = 1, 0, -1


def open_annotated_pair(cfg: CfgNode) -> tuple[LabeledImages, LabeledImages]:
    """Open two annotated sets with the class list of the first."""
    train, val = cfg.DATA.TRAIN, cfg.DATA.VAL
    for key, where in (("DATA.TRAIN", train), ("DATA.VAL", val)):
        if not where:
            raise KsclError(f"No images are named. Set {key} to {forms()}.")
    classes = on_first_rank(lambda: shared_class_names([parse_source(train)]))
    return open_annotated(train, classes, cfg), open_annotated(val, classes, cfg)


def open_annotated(where: str, classes: Sequence[str], cfg: CfgNode) -> LabeledImages:
    """Open an annotated set; raise one error with every problem in it."""
    source = parse_source(where)
    found = read_source(source, classes).checked()
    root = source.image_folder
    names = Names.pack(os.path.relpath(image.path or "", root) for image in found.images)
    labels = label_matrix(found)
    return LabeledImages(
        FileSource(where, str(root), names),
        list(classes),
        np.arange(len(found.images)),
        labels,
        on_first_rank(lambda: _fingerprint(root, found, labels, cfg.DATA.CACHE_DIR)),
        cfg.DATA.MAX_PIXELS,
    )


def label_matrix(found: AnnotatedSet) -> np.ndarray:
    """Return (N, C), int64: PRESENT, ABSENT, or IGNORED where all objects are difficult."""
    numbers = {name: number for number, name in enumerate(found.class_names)}
    labels = np.full((len(found.images), len(numbers)), ABSENT, np.int64)
    for row, image in zip(labels, found.images, strict=True):
        for thing in sorted(image.objects, key=lambda thing: not thing.difficult):
            row[numbers[thing.name]] = IGNORED if thing.difficult else PRESENT
    return labels


def _fingerprint(
    root: str | Path, found: AnnotatedSet, labels: np.ndarray, cache_dir: str
) -> dict[str, object]:
    """Describe the images of the folder, and which of them show what."""
    images = fingerprint(root, cache_dir)
    digest = hashlib.sha256(images.hash.encode())
    digest.update("\0".join([*found.class_names, *(i.id for i in found.images)]).encode())
    digest.update(labels.astype(np.int8).tobytes())
    path = os.path.abspath(root)
    return images.as_dict() | {
        "hash": digest.hexdigest()[:16],
        "parts": [{"path": path, "hash": images.hash}],
    }


def is_annotated(where: str) -> bool:
    """Tell an annotated set (voc:FOLDER:SPLIT and the like) from a folder."""
    return ":" in where or where.startswith(("voc_", "coco_"))
