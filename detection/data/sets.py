"""The annotated sets of a run, read and checked once.

A set is named as in `kscl.data.annotations`, or as registered with Detectron2.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.build import filter_images_with_only_crowd_annotations
from detectron2.structures import BoxMode

from detection.backbones import C4
from detection.config import FRACTION_KEY, META_ARCHITECTURES
from detection.data.preflight import Part, Report, preflight
from detection.scoring.boxes import GroundTruth, make_ground_truth, segmentation
from kscl.config import value_at
from kscl.data.annotations import (
    ANNOTATION_FORMATS,
    AnnotatedObject,
    AnnotatedSet,
    Problem,
    Source,
    is_set_name,
    parse_source,
)
from kscl.data.labeled import draw_labeled, draw_of
from kscl.errors import KsclError
from kscl.records.fingerprint import fingerprint

Dicts = list[dict[str, Any]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSets:
    """Training and test sets with one class list, sent to every rank."""

    class_names: tuple[str, ...]
    train: list[Part]
    test: Part
    fingerprints: dict[str, dict[str, Any]]  # by role, taken before the start
    bad_images: dict[str, str] = field(default_factory=dict)  # unreadable training images → reason

    def labeled(self, cfg: CfgNode) -> RunSets:
        """Return the sets with the training images chosen by KSCL.FRACTION and KSCL.DRAW."""
        return replace(self, train=draw_parts(self.train, cfg))

    @property
    def num_train(self) -> int:
        """Return the number of training images, those without objects included."""
        return sum(len(annotated.images) for _, annotated in self.train)

    def train_dicts(self, cfg: CfgNode) -> Dicts:
        """Return the training images in Detectron2's format, filtered as the config says."""
        dicts = [
            image
            for source, annotated in self.train
            for image in detectron2_dicts(annotated, ANNOTATION_FORMATS[source.format].crowds)
        ]
        if cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS:
            dicts = filter_images_with_only_crowd_annotations(dicts)
        return dicts

    def test_dicts(self) -> Dicts:
        """Return the test images in Detectron2's format."""
        return detectron2_dicts(self.test[1])

    @cached_property
    def ground_truth(self) -> GroundTruth:
        """Return the annotated boxes of the test set."""
        return make_ground_truth(self.test[1])


def read_run_sets(cfg: CfgNode) -> tuple[RunSets, Report]:
    """Read and check the config's sets; one error lists every problem."""
    report = check_sets(cfg).checked()
    parts = report.annotated
    (test,) = parts["test"]
    fingerprints = {role: _fingerprint(parts[role]) for role in parts}
    for path, reason in report.skipped.items():
        log.warning("%s %s. It is skipped.", path, reason)
    sets = RunSets(report.class_names, parts["train"], test, fingerprints, report.skipped)
    return sets, report


def draw_parts(train: Sequence[Part], cfg: CfgNode) -> list[Part]:
    """Return the sets with KSCL.FRACTION of all their images; difficult objects do not count."""
    if cfg.KSCL.FRACTION == 1:
        return list(train)
    images = [image for _, annotated in train for image in annotated.images]
    names = sorted({thing.name for image in images for thing in image.objects})
    shown = [
        [names.index(thing.name) for thing in image.objects if not thing.difficult]
        for image in images
    ]
    draw = draw_of(cfg.KSCL, cfg.SEED)
    drawn = draw_labeled(shown, cfg.KSCL.FRACTION, draw, FRACTION_KEY)
    kept = {id(images[number]) for number in drawn}
    return [
        (source, replace(annotated, images=[i for i in annotated.images if id(i) in kept]))
        for source, annotated in train
    ]


def check_sets(cfg: CfgNode) -> Report:
    """Read the config's sets and report every problem."""
    key = META_ARCHITECTURES[cfg.MODEL.META_ARCHITECTURE].classes_key
    report = preflight(
        [source_of(name) for name in cfg.DATASETS.TRAIN],
        [source_of(name) for name in cfg.DATASETS.TEST],
        cfg.KSCL.CLASS_NAMES or None,
        num_classes=value_at(cfg, key),
        mask_format=cfg.INPUT.MASK_FORMAT if cfg.MODEL.MASK_ON else "",
        classes_key=key,
        max_bad_fraction=cfg.KSCL.MAX_BAD_FRACTION,
    )
    report.problems += too_small_images(cfg, report)
    return report


def source_of(name: str) -> Source:
    """Return the source of a set by its name here or in Detectron2's catalog."""
    if name not in DatasetCatalog or is_set_name(name):
        return parse_source(name)
    known = MetadataCatalog.get(name).as_dict()
    if "dirname" in known:  # first: Detectron2's COCO evaluator adds a json_file to VOC sets
        return Source(name, "voc", Path(known["dirname"]), split=known["split"])
    if "image_root" in known:
        root, file = Path(known["image_root"]), Path(known["json_file"])
        return Source(name, "coco", root, annotations=file)
    raise KsclError(
        f"{name} must be registered as a VOC folder or a COCO file to be checked and scored. Use "
        "Detectron2's register_pascal_voc or register_coco_instances."
    )


def detectron2_dicts(annotated: AnnotatedSet, crowds: bool = False) -> Dicts:
    """Return the images as Detectron2's own loaders do, plus `difficult` for each box.

    Difficult objects are trained on, except in a set with `crowds` (COCO, Cityscapes). The scorers
    ignore both.
    """
    index = {name: number for number, name in enumerate(annotated.class_names)}
    return [
        {
            "file_name": str(image.path),
            "image_id": image.id,
            "height": image.height,
            "width": image.width,
            "annotations": [
                {
                    "category_id": index[thing.name],
                    "difficult": int(thing.difficult),
                    **_box(thing, crowds),
                    **_mask(thing),
                }
                for thing in image.objects
                if thing.mask is None or _mask(thing)  # as in Detectron2's loader
            ],
        }
        for image in annotated.images
    ]


def _box(thing: AnnotatedObject, crowds: bool) -> dict[str, Any]:
    """Return the box in the mode of the file; Detectron2 converts it in single precision."""
    if not crowds:
        return {"bbox": list(thing.box), "bbox_mode": BoxMode.XYXY_ABS}
    x1, y1, x2, y2 = thing.box
    box = [x1, y1, x2 - x1, y2 - y1]
    return {"bbox": box, "bbox_mode": BoxMode.XYWH_ABS, "iscrowd": int(thing.difficult)}


def _mask(thing: AnnotatedObject) -> dict[str, Any]:
    found = None if thing.mask is None else segmentation(thing.mask)
    return {} if found is None else {"segmentation": found}


def _fingerprint(parts: Sequence[Part]) -> dict[str, Any]:
    """Describe images and annotations, so that a leaderboard notices changes."""
    digest, files, size = hashlib.sha256(), 0, 0
    hashes: dict[Path, str] = {}
    for source, annotated in parts:
        images = fingerprint(source.root)
        truth = make_ground_truth(annotated)
        digest.update(f"{images.hash} {truth.fingerprint}\n".encode())
        files, size = files + images.files, size + images.bytes
        hashes[source.root] = images.hash
        hashes |= {part: fingerprint(part).hash for part in source.parts if part != source.root}
    return {
        "hash": digest.hexdigest()[:16],
        "files": files,
        "bytes": size,
        "parts": [{"path": str(path.absolute()), "hash": hash_} for path, hash_ in hashes.items()],
    }


def too_small_images(cfg: CfgNode, report: Report) -> Iterator[Problem]:
    """Yield a problem for every input size below the stride of the coarsest level."""
    stride = META_ARCHITECTURES[cfg.MODEL.META_ARCHITECTURE].coarsest
    if cfg.MODEL.BACKBONE.NAME == C4:
        return
    sizes = {
        "train": (min(cfg.INPUT.MIN_SIZE_TRAIN), cfg.INPUT.MAX_SIZE_TRAIN),
        "test": (cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST),
    }
    for role, (shorter, longer) in sizes.items():
        key = f"INPUT.MIN_SIZE_{role.upper()}"
        if shorter == 0:  # images keep their own size
            for _, annotated in report.annotated[role]:
                for image in annotated.images:
                    if min(image.width, image.height) < stride:
                        what = f"is {image.width} x {image.height} pixels, and {key} is 0"
                        yield _problem(str(image.path), what, stride)
        elif min(shorter, longer) < stride:
            what = f"is {shorter} and INPUT.MAX_SIZE_{role.upper()} is {longer}"
            yield _problem(key, what, stride)


def _problem(where: str, what: str, stride: int) -> Problem:
    what += f", but the coarsest level of the feature pyramid has a stride of {stride} pixels"
    return Problem("image too small", where, what, f"Use images of at least {stride} pixels")
