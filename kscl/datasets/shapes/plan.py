"""Decide which picture shows what, before anything is drawn.

With the plan made in one place, a picture depends on nothing but its own entry: any number of
workers can draw it, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

from kscl.datasets.shapes.chance import Chance
from kscl.datasets.shapes.settings import ShapesSettings

# One random stream per part of the set; the numbers are part of the data set's identity.
_STREAMS = {"unlabeled": 0, "train": 1, "val": 2, "trainval": 3, "test": 4}
_PLANNING = 16  # added to a part's stream: which classes its scenes show


@dataclass(frozen=True)
class Drawing:
    """One picture to draw."""

    part: str
    index: int
    name: str  # the path of a portrait, the six digits of a scene
    labels: tuple[int, ...]

    @property
    def is_scene(self) -> bool:
        """Whether it shows several annotated objects."""
        return self.part in ("trainval", "test")

    def chance(self, seed: int) -> Chance:
        """Return the random stream of this picture."""
        return Chance(seed, _STREAMS[self.part], self.index)


def plan(settings: ShapesSettings) -> list[Drawing]:
    """List every picture of the data set."""
    drawings = []
    for index in range(settings.unlabeled):
        label = index % settings.num_classes
        drawings.append(Drawing("unlabeled", index, f"unlabeled/{index:06d}.jpg", (label,)))
    for part, count in (("train", settings.train), ("val", settings.val)):
        for index in range(count):
            label = index % settings.num_classes
            folder = f"classes/{part}/{settings.class_names[label]}"
            drawings.append(Drawing(part, index, f"{folder}/{index:06d}.jpg", (label,)))
    number = 1
    for part, count in (("trainval", settings.detection_train), ("test", settings.detection_test)):
        for index, labels in enumerate(_casts(settings, part, count)):
            drawings.append(Drawing(part, index, f"{number:06d}", labels))
            number += 1
    return drawings


def _casts(settings: ShapesSettings, part: str, count: int) -> list[tuple[int, ...]]:
    """Deal the labels of each scene from shuffled decks: no class comes up much more often."""
    chance = Chance(settings.seed, _PLANNING + _STREAMS[part], 0)
    deck: list[int] = []
    casts = []
    for _ in range(count):
        size = chance.integer(settings.min_objects, settings.max_objects)
        while len(deck) < size:
            deck += chance.shuffled(range(settings.num_classes))
        casts.append(tuple(deck[:size]))
        deck = deck[size:]
    return casts
