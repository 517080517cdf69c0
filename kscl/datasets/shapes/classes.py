"""The 20 classes: pairs of a texture and a form, of which neither alone decides the class."""

from __future__ import annotations

from typing import NamedTuple

from kscl.datasets.shapes.forms import FORMS
from kscl.datasets.shapes.textures import TEXTURES


class ShapeClass(NamedTuple):
    """A texture on a form."""

    texture: str
    form: str

    @property
    def name(self) -> str:
        """The name of its folder and of its annotations."""
        return f"{self.texture}_{self.form}"


def _in_order() -> list[ShapeClass]:
    """List the classes in rounds that pair every form with another texture.

    So the five of a round differ in both. The fifth possible round is left out: every form comes
    with four textures, and every texture on four forms.
    """
    textures = list(TEXTURES)
    return [
        ShapeClass(textures[(index + turn) % len(textures)], form)
        for turn in range(4)
        for index, form in enumerate(FORMS)
    ]


CLASSES = tuple(_in_order())
CLASS_NAMES = tuple(each.name for each in CLASSES)
