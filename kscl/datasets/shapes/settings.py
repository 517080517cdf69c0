"""The settings of the data set, and which values they can have."""

from __future__ import annotations

from dataclasses import dataclass

from kscl.datasets.shapes.classes import CLASS_NAMES
from kscl.errors import KsclError

SMALLEST_IMAGE = 32
SMALLEST_SCENE = 64
LARGEST_SIDE = 4096
MOST_OBJECTS = 50
MOST_IMAGES = 999_999  # VOC's names have six digits


@dataclass(frozen=True)
class ShapesSettings:
    """Everything the pixels depend on; counts are pictures in total, not per class."""

    seed: int = 0
    num_classes: int = len(CLASS_NAMES)
    unlabeled: int = 5000
    train: int = 2000
    val: int = 1000
    detection_train: int = 400
    detection_test: int = 200
    image_size: int = 96
    detection_size: int = 160  # the shorter side
    min_objects: int = 5
    max_objects: int = 9

    @property
    def class_names(self) -> tuple[str, ...]:
        """The first `num_classes` of all classes."""
        return CLASS_NAMES[: self.num_classes]


def check(settings: ShapesSettings) -> None:
    """Raise one error that lists everything that is wrong."""
    wrong = [
        f"{name} is {value}; it can be {low} to {high}."
        for name, value, low, high in _ranges(settings)
        if not low <= value <= high
    ]
    if not wrong:
        wrong = _classes_left_out(settings)
    if wrong:
        raise KsclError("This data set cannot be drawn:\n  " + "\n  ".join(wrong))


def _ranges(settings: ShapesSettings) -> list[tuple[str, int, int, int]]:
    return [
        # The random streams are keyed by 32-bit words.
        ("seed", settings.seed, 0, 2**32 - 1),
        ("num_classes", settings.num_classes, 1, len(CLASS_NAMES)),
        ("unlabeled", settings.unlabeled, 1, MOST_IMAGES),
        ("train", settings.train, 1, MOST_IMAGES),
        ("val", settings.val, 1, MOST_IMAGES),
        ("detection_train", settings.detection_train, 1, MOST_IMAGES // 2),
        ("detection_test", settings.detection_test, 1, MOST_IMAGES // 2),
        ("image_size", settings.image_size, SMALLEST_IMAGE, LARGEST_SIDE),
        ("detection_size", settings.detection_size, SMALLEST_SCENE, LARGEST_SIDE),
        ("min_objects", settings.min_objects, 1, MOST_OBJECTS),
        ("max_objects", settings.max_objects, settings.min_objects, MOST_OBJECTS),
    ]


def _classes_left_out(settings: ShapesSettings) -> list[str]:
    """List the splits too small to hold every class; a score over them would mean nothing."""
    fewest = settings.min_objects
    shown = {
        "train": settings.train,
        "val": settings.val,
        "detection_train": settings.detection_train * fewest,
        "detection_test": settings.detection_test * fewest,
    }
    return [
        f"{name} shows {count} objects for {settings.num_classes} classes; "
        "ask for more pictures or a smaller num_classes."
        for name, count in shown.items()
        if count < settings.num_classes
    ]
