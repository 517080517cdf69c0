"""Augmentation recipes: the known ones, and the check of a user's.

A recipe is a list of mappings `{op: name, parameter: value, ...}`, applied in order; parameters
that are left out have their defaults. The augmentations, which need OpenCV, are imported when a
recipe is checked, so that a `--help` does without.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Recipe = list[dict[str, Any]]

RANDOM_CROP = "random_resized_crop"


def _jitter(strength: float, hue: float, p: float) -> dict[str, Any]:
    """Return a jitter that is equally strong in all but the hue, as every known recipe has it."""
    equal = dict.fromkeys(("brightness", "contrast", "saturation"), strength)
    return {"op": "color_jitter", **equal, "hue": hue, "p": p}


# MoCo's main_moco.py without --aug-plus.
MOCO_V1: Recipe = [
    {"op": RANDOM_CROP, "scale": [0.2, 1.0]},
    {"op": "grayscale", "p": 0.2},
    _jitter(0.4, hue=0.4, p=1.0),
    {"op": "horizontal_flip", "p": 0.5},
]

# MoCo's main_moco.py with --aug-plus.
MOCO_V2: Recipe = [
    {"op": RANDOM_CROP, "scale": [0.2, 1.0]},
    _jitter(0.4, hue=0.1, p=0.8),
    {"op": "grayscale", "p": 0.2},
    {"op": "gaussian_blur", "sigma": [0.1, 2.0], "p": 0.5},
    {"op": "horizontal_flip", "p": 0.5},
]

# The SimCLR paper's appendix A at color strength 1: the blur comes after the flip and the colors.
SIMCLR: Recipe = [
    {"op": RANDOM_CROP, "scale": [0.08, 1.0]},
    {"op": "horizontal_flip", "p": 0.5},
    _jitter(0.8, hue=0.2, p=0.8),
    {"op": "grayscale", "p": 0.2},
    {"op": "gaussian_blur", "sigma": [0.1, 2.0], "p": 0.5},
]

RECIPES: dict[str, Recipe] = {"moco_v1": MOCO_V1, "moco_v2": MOCO_V2, "simclr": SIMCLR}


def with_scale(recipe: Iterable[Mapping[str, Any]], scale: tuple[float, float]) -> Recipe:
    """Return the same recipe with random crops of this fraction of the area."""
    return [{**op, "scale": scale} if op["op"] == RANDOM_CROP else dict(op) for op in recipe]


def check_recipe(recipe: object, where: str) -> list[str]:
    """Return every problem of a recipe; `where` is the name to report, e.g. its config key."""
    if not isinstance(recipe, Sequence) or isinstance(recipe, str):
        return [f"{where} must be a list of ops, each like {{op: horizontal_flip, p: 0.5}}"]
    return [text for i, op in enumerate(recipe) for text in _op_problems(op, f"{where}[{i}]")]


def check_scale(scale: object) -> str | None:
    """Return what is wrong with the scale of random crops, or None."""
    from kscl.views.augment import AUGMENTATIONS

    return AUGMENTATIONS[RANDOM_CROP].parameters["scale"].problem(scale)


def _op_problems(op: object, where: str) -> list[str]:
    from kscl.views.augment import AUGMENTATIONS

    if not isinstance(op, Mapping) or "op" not in op:
        return [f"{where} must be a mapping with the op's name, like {{op: grayscale, p: 0.2}}"]
    name = op["op"]
    if not isinstance(name, str) or name not in AUGMENTATIONS:
        return [f"{where}: there is no op {name!r}; {_nearest(name, AUGMENTATIONS)}"]
    parameters, problems = AUGMENTATIONS[name].parameters, []
    for key, value in op.items():
        if key == "op":
            continue
        if key not in parameters:
            problems.append(
                f"{where}: {name} has no parameter {key!r}; {_nearest(key, parameters)}"
            )
        elif problem := parameters[key].problem(value):
            problems.append(f"{where}: {key} of {name} {problem}, got {value!r}")
    return problems


def _nearest(name: object, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(valid), n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(valid)}"
