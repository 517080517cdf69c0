"""Annotated sets to score on."""

from __future__ import annotations

from kscl.data.annotations import AnnotatedImage, AnnotatedObject, AnnotatedSet

VOC, VOC10, COCO101 = "voc07-11pt", "voc10-every-point", "coco-101pt"


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
