"""What happens to one view: a recipe's random choices, made from numbers in [0, 1).

The result is a list of steps `(name, value)` with nothing random left in it, so that any route
(ours, or torchvision's on PIL pictures in the tests) can make the same view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kscl.views.recipes import Op

Step = tuple[str, Any]
Draw = Callable[[], float]  # the next number from [0, 1)


class Box(NamedTuple):
    """A crop in pixels."""

    top: int
    left: int
    height: int
    width: int


CROP_TRIES = 10
JITTERS = ("brightness", "contrast", "saturation", "hue")

# The most numbers an op can use; a view's numbers start at a fixed index whatever the others used.
MOST_DRAWS = {
    "random_resized_crop": 2 * CROP_TRIES + 2,
    "color_jitter": 1 + 2 * len(JITTERS),
    "grayscale": 1,
    "gaussian_blur": 2,
    "horizontal_flip": 1,
    "solarize": 1,
}


def draws_per_view(ops: Sequence[Op]) -> int:
    """Return how many random numbers are set aside for one view."""
    return sum(MOST_DRAWS[op["op"]] for op in ops)


def sample_view(
    ops: Sequence[Op], height: int, width: int, size: int, draws: Iterable[float]
) -> list[Step]:
    """Return the steps of one view of a picture; `ops` has its defaults written out."""
    draw = iter(draws).__next__
    steps: list[Step] = []
    if all(op["op"] != "random_resized_crop" for op in ops):
        # Views must share one size: without a random crop it is the middle square.
        steps.append(("crop", center_square(height, width)))
        height = width = size
    for op in ops:
        name = op["op"]
        if name == "random_resized_crop":
            steps.append(("crop", sample_crop(height, width, op["scale"], op["ratio"], draw)))
            height = width = size
        elif draw() < op["p"]:
            steps.extend(_SAMPLERS[name](op, draw))
    return steps


def center_square(height: int, width: int) -> Box:
    """Return the largest square in the middle."""
    side = min(height, width)
    return Box((height - side) // 2, (width - side) // 2, side, side)


def sample_crop(
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    draw: Draw,
) -> Box:
    """Draw a crop: area uniform in `scale`, aspect (width / height) log-uniform in `ratio`.

    Its position is uniform. A box that does not fit is drawn again; after ten tries the largest
    middle box of a legal aspect is taken, as torchvision does.
    """
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(CROP_TRIES):
        area = height * width * _between(scale, draw)
        aspect = math.exp(_between((log_low, log_high), draw))
        box_width = round(math.sqrt(area * aspect))
        box_height = round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = int(draw() * (height - box_height + 1))
            left = int(draw() * (width - box_width + 1))
            return Box(top, left, box_height, box_width)
    aspect = min(max(width / height, ratio[0]), ratio[1])
    box_width = max(1, min(width, round(height * aspect)))
    box_height = max(1, min(height, round(width / aspect)))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def _between(ends: tuple[float, float], draw: Draw) -> float:
    return ends[0] + (ends[1] - ends[0]) * draw()


def _sample_jitter(op: Op, draw: Draw) -> list[Step]:
    ranks = [draw() for _ in JITTERS]
    factors = []
    for name in JITTERS:
        strength, u = op[name], draw()
        low, high = (
            (-strength, strength) if name == "hue" else (max(0.0, 1 - strength), 1 + strength)
        )
        factors.append(low + (high - low) * u)
    order = sorted(range(len(JITTERS)), key=ranks.__getitem__)
    return [(JITTERS[index], factors[index]) for index in order if op[JITTERS[index]] > 0]


_SAMPLERS: dict[str, Callable[[Op, Draw], list[Step]]] = {
    "color_jitter": _sample_jitter,
    "grayscale": lambda op, draw: [("grayscale", None)],
    "gaussian_blur": lambda op, draw: [("blur", _between(op["sigma"], draw))],
    "horizontal_flip": lambda op, draw: [("flip", None)],
    "solarize": lambda op, draw: [("solarize", op["threshold"])],
}
