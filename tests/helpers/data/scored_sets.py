"""Annotated sets to score on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from detection.commands.score import find_ground_truth
from detection.scoring.boxes import GroundTruth
from kscl.data.annotations import AnnotatedImage, AnnotatedObject, AnnotatedSet

VOC, VOC10, COCO101 = "voc07-11pt", "voc10-every-point", "coco-101pt"


def truth_of(root: Path, classes: Sequence[str]) -> GroundTruth:
    """Return what there is to find in the test split of a VOC folder."""
    return find_ground_truth(f"{root}:test", tuple(classes))


def annotated(things, classes, with_area=False) -> AnnotatedSet:
    images = []
    for image_id, found in things.items():
        objects = tuple(
            AnnotatedObject(
                name,
                (box[0] - 1.0, box[1] - 1.0, float(box[2]), float(box[3])),
                bool(difficult),
                area=50.0 * place if with_area else None,
            )
            for place, (name, box, difficult) in enumerate(found, 1)
        )
        images.append(AnnotatedImage(image_id, None, 300, 300, objects, "made here"))
    return AnnotatedSet("random", tuple(classes), images)
