"""The 20 classes: pairs of a texture and a form of which neither alone tells the class."""

from __future__ import annotations

from typing import NamedTuple

from kscl.datasets.shapes.forms import FORMS
from kscl.datasets.shapes.textures import TEXTURES


class ShapeClass(NamedTuple):
    texture: str
    form: str

    @property
    def name(self) -> str:
        return f"{self.texture}_{self.form}"


def _in_order() -> list[ShapeClass]:
    """Each round pairs every form with another texture, so any 5 in a round differ in both.

    The fifth of the possible rounds is left out: every form comes with four textures and every
    texture on four forms.
    """
    textures = list(TEXTURES)
    return [
        ShapeClass(textures[(place + turn) % len(textures)], form)
        for turn in range(4)
        for place, form in enumerate(FORMS)
    ]


CLASSES = tuple(_in_order())
CLASS_NAMES = tuple(each.name for each in CLASSES)
