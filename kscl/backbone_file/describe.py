"""What a file says of its backbone, checked field by field: it may come from anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import timm

from kscl.errors import KsclError
from kscl.methods.encoder import check_arguments

DESCRIPTION = "kscl_backbone"  # the key in a safetensors file's metadata
DESCRIPTION_VERSION = 1
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
LARGEST_SIZE = 4096  # pixels
FIX = "Export the backbone again (tools/pretrain.py, or kscl.save_backbone)."


@dataclass(frozen=True)
class Description:
    """What must travel with the weights of a backbone for anyone to use them rightly."""

    arch: str  # a timm model name
    kwargs: dict[str, Any] = field(default_factory=dict)  # for timm.create_model
    mean: tuple[float, ...] = IMAGENET_MEAN  # of the input, RGB in [0, 1]
    std: tuple[float, ...] = IMAGENET_STD
    size: int = 224
    source: dict[str, Any] = field(default_factory=dict)  # the run: config hash, method, epochs


def parse_description(text: str, name: str) -> Description:
    """Return the description in JSON metadata; `name` is the file, for errors."""
    try:
        about = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise KsclError(
            f"{name}: its metadata '{DESCRIPTION}' is not JSON ({error}). {FIX}"
        ) from error
    return check_description(about, name)


def check_description(about: object, name: str) -> Description:
    """Return the description in plain values, or raise an error that names the file and field."""
    if not isinstance(about, Mapping):
        raise _refused(name, DESCRIPTION, f"is a {type(about).__name__}, not an object with fields")
    given = dict(about)
    version = given.pop("version", None)
    if type(version) is not int or version != DESCRIPTION_VERSION:
        raise KsclError(
            f"{name}: its version is {str(version)[:40]!r}, and this release reads version "
            f"{DESCRIPTION_VERSION} of the description. {FIX}"
        )
    known = [f.name for f in fields(Description)]
    for key in known:
        if key not in given:
            raise _refused(name, key, "is missing")
    for key in given:
        if key not in known:
            raise _refused(
                name, str(key)[:40], f"is not a field; the fields are {', '.join(known)}"
            )
    for key, problem in (
        ("arch", _arch_problem(given["arch"])),
        ("kwargs", _kwargs_problem(given["kwargs"])),
        ("mean", _color_problem(given["mean"], positive=False)),
        ("std", _color_problem(given["std"], positive=True)),
        ("size", _size_problem(given["size"])),
        ("source", None if isinstance(given["source"], dict) else "is not an object with fields"),
    ):
        if problem is not None:
            raise _refused(name, key, f"{problem}, not {str(given[key])[:60]!r}")
    given["mean"], given["std"] = tuple(given["mean"]), tuple(given["std"])
    return Description(**given)


def _refused(name: str, key: str, problem: str) -> KsclError:
    return KsclError(f"{name}: the field '{key}' of its description {problem}. {FIX}")


def _arch_problem(value: object) -> str | None:
    if not isinstance(value, str):
        return "must be the name of a timm model"
    return None if timm.is_model(value) else "must be the name of a model that timm has"


def _kwargs_problem(value: object) -> str | None:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return "must be an object of arguments by name"
    try:
        check_arguments(value)
    except KsclError as error:
        return f"holds an argument that is refused ({str(error).removesuffix('.')})"
    return None


def _color_problem(value: object, positive: bool) -> str | None:
    wanted = f"must be three finite numbers{' greater than 0' if positive else ''}"
    if not isinstance(value, list | tuple) or len(value) != 3:
        return wanted
    for number in value:
        if isinstance(number, bool) or not isinstance(number, int | float):
            return wanted
        if abs(number) > 1e6 or math.isnan(number) or (positive and number <= 0):
            return wanted
    return None


def _size_problem(value: object) -> str | None:
    if type(value) is int and 1 <= value <= LARGEST_SIZE:
        return None
    return f"must be a whole number of pixels from 1 to {LARGEST_SIZE}"
