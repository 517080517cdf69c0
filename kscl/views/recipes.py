"""Augmentation recipes as plain lists: the ops, their parameters, and the three known recipes.

A recipe is a list of mappings `{op: name, parameter: value, ...}`, applied in its order; a
parameter that is left out has the default below. This file imports neither torch nor OpenCV, so
that a config can be checked before anything heavy is loaded.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Op = dict[str, Any]


@dataclass(frozen=True)
class Number:
    """A single number between two bounds."""

    default: float
    low: float
    high: float

    def problem(self, value: object) -> str | None:
        """Return what is wrong with a value, or None."""
        if not _is_number_between(value, self.low, self.high):
            return f"must be a number from {self.low:g} to {self.high:g}"
        return None


@dataclass(frozen=True)
class Pair:
    """A range [low end, high end] inside two bounds, drawn from uniformly."""

    default: tuple[float, float]
    low: float
    high: float

    def problem(self, value: object) -> str | None:
        """Return what is wrong with a value, or None."""
        wanted = f"must be [low, high] with {self.low:g} <= low <= high <= {self.high:g}"
        if not isinstance(value, list | tuple) or len(value) != 2:
            return wanted
        inside = all(_is_number_between(end, self.low, self.high) for end in value)
        return None if inside and value[0] <= value[1] else wanted


def _is_number_between(value: object, low: float, high: float) -> bool:
    # bool is an int to Python, but `p: true` in a file is a mistake.
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _chance(default: float) -> Number:
    return Number(default, 0.0, 1.0)


RANDOM_CROP = "random_resized_crop"

# Meanings and units are torchvision's; the blur's sigma is in pixels of the picture it meets.
OPS: dict[str, dict[str, Number | Pair]] = {
    RANDOM_CROP: {
        "scale": Pair((0.08, 1.0), 1e-4, 1.0),
        "ratio": Pair((3 / 4, 4 / 3), 0.01, 100.0),
    },
    "color_jitter": {
        "brightness": Number(0.0, 0.0, 10.0),
        "contrast": Number(0.0, 0.0, 10.0),
        "saturation": Number(0.0, 0.0, 10.0),
        "hue": Number(0.0, 0.0, 0.5),
        "p": _chance(1.0),
    },
    "grayscale": {"p": _chance(0.2)},
    "gaussian_blur": {"sigma": Pair((0.1, 2.0), 0.0, 50.0), "p": _chance(0.5)},
    "horizontal_flip": {"p": _chance(0.5)},
    "solarize": {"threshold": Number(128, 0, 256), "p": _chance(0.2)},
}


def _jitter(strength: float, hue: float, p: float) -> Op:
    """Return a jitter that is equally strong in all but the hue, as every known recipe has it."""
    equal = dict.fromkeys(("brightness", "contrast", "saturation"), strength)
    return {"op": "color_jitter", **equal, "hue": hue, "p": p}


# MoCo's main_moco.py without --aug-plus.
MOCO_V1: list[Op] = [
    {"op": "random_resized_crop", "scale": [0.2, 1.0]},
    {"op": "grayscale", "p": 0.2},
    _jitter(0.4, hue=0.4, p=1.0),
    {"op": "horizontal_flip", "p": 0.5},
]

# MoCo's main_moco.py with --aug-plus.
MOCO_V2: list[Op] = [
    {"op": "random_resized_crop", "scale": [0.2, 1.0]},
    _jitter(0.4, hue=0.1, p=0.8),
    {"op": "grayscale", "p": 0.2},
    {"op": "gaussian_blur", "sigma": [0.1, 2.0], "p": 0.5},
    {"op": "horizontal_flip", "p": 0.5},
]

# The SimCLR paper's appendix A at color strength 1: the blur comes after the flip and the colors.
SIMCLR: list[Op] = [
    {"op": "random_resized_crop", "scale": [0.08, 1.0]},
    {"op": "horizontal_flip", "p": 0.5},
    _jitter(0.8, hue=0.2, p=0.8),
    {"op": "grayscale", "p": 0.2},
    {"op": "gaussian_blur", "sigma": [0.1, 2.0], "p": 0.5},
]

RECIPES: dict[str, list[Op]] = {"moco_v1": MOCO_V1, "moco_v2": MOCO_V2, "simclr": SIMCLR}


def check_recipe(ops: object, where: str) -> list[str]:
    """Return every problem of a recipe, with the nearest valid name; nothing if it is good.

    `where` is what the reader calls the list, for instance its config key.
    """
    if not isinstance(ops, Sequence) or isinstance(ops, str):
        return [f"{where} must be a list of ops, each like {{op: horizontal_flip, p: 0.5}}"]
    return [
        problem for index, op in enumerate(ops) for problem in _op_problems(op, f"{where}[{index}]")
    ]


def _op_problems(op: object, where: str) -> list[str]:
    if not isinstance(op, Mapping) or "op" not in op:
        return [f"{where} must be a mapping with the op's name, like {{op: grayscale, p: 0.2}}"]
    name = op["op"]
    if not isinstance(name, str) or name not in OPS:
        return [f"{where}: there is no op {name!r}; {_nearest(name, OPS)}"]
    problems = []
    for key, value in op.items():
        if key == "op":
            continue
        if key not in OPS[name]:
            problems.append(f"{where}: {name} has no parameter {key!r}; {_nearest(key, OPS[name])}")
        elif problem := OPS[name][key].problem(value):
            problems.append(f"{where}: {key} of {name} {problem}, not {value!r}")
    return problems


def _nearest(name: object, valid: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(str(name), list(valid), n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(valid)}"


def with_scale(ops: Sequence[Mapping[str, Any]], scale: tuple[float, float]) -> list[Op]:
    """Return the same recipe with random crops of this fraction of the area."""
    return [{**op, "scale": scale} if op["op"] == RANDOM_CROP else dict(op) for op in ops]


def with_defaults(ops: Sequence[Mapping[str, Any]]) -> list[Op]:
    """Return the same recipe with every parameter written out."""
    complete = []
    for op in ops:
        defaults = {key: parameter.default for key, parameter in OPS[op["op"]].items()}
        complete.append({"op": op["op"], **defaults, **{k: v for k, v in op.items() if k != "op"}})
    return complete
