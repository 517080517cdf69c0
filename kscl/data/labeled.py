"""A fraction of the labeled images: nested random subsets that show every class.

A draw puts the images in a random order, which depends only on its number and theirs, and a
fraction is the start of it. So the subsets of one draw are nested, and the same for all contenders.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fvcore.common.config import CfgNode

from kscl.config import key
from kscl.errors import KsclError
from kscl.rng import Stream, permutation

FRACTION_IN_PROTOCOL = "label_fraction"  # of a definition; missing where all labels are used
OF_SEED = -1  # a draw with the number of the run's seed
FRACTION = key(
    1.0,
    """Fraction of the training images, drawn at random so that every class appears; smaller
    fractions are subsets of larger ones.""",
    above=0,
    at_most=1,
)
DRAW = key(
    OF_SEED,
    "Number of the random draw of FRACTION: equal numbers draw equal images; -1 is SEED.",
    at_least=OF_SEED,
)


def draw_labeled(
    shown: Sequence[Iterable[int]], fraction: float, draw: int, name: str
) -> list[int]:
    """Return this fraction of the images, ascending, given the classes that each image shows.

    The first image of every class comes before all others. `name` is the key's, for an error.
    """
    classes = len({number for of_image in shown for number in of_image})
    count = round(fraction * len(shown))
    if count < max(1, classes):  # enough in every draw, not only in a lucky one
        raise KsclError(
            f"{name} {fraction:g} of {len(shown):,} training images is {count}, which cannot show "
            f"all {classes} classes. Set it to at least {max(1, classes) / len(shown):.2g}, or "
            "label more images."
        )
    seen: set[int] = set()
    first: list[int] = []
    others: list[int] = []
    for image in permutation(draw, 0, Stream.LABELED, len(shown)).tolist():
        new = set(shown[image]) - seen
        (first if new else others).append(image)
        seen |= new
    return sorted([*first, *others][:count])


def draw_of(section: CfgNode, seed: int) -> int:
    """Return the number of the random draw of FRACTION in a config's section."""
    return seed if section.DRAW == OF_SEED else section.DRAW


def percent_words(fraction: float) -> str:
    """Return what the id of a protocol ends in; nothing where all labels are used."""
    return f"-{100 * fraction:g}percent" if fraction < 1 else ""
