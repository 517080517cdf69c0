"""What a suite needs only at its end: the rows and the image that its leaderboard refers to."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROW_KEY = re.compile(r"[0-9a-f]{8}")  # as the page of a board shows it
RANDOM = "random"
SHAPES_FOLDER = "datasets/shapes"  # where they are drawn unless the suite says it


def reference_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield baselines that no row will have, and a basis image that is not there."""
    contenders = values.get("contenders")
    if not isinstance(contenders, dict):
        return
    described = {key: about for key, about in contenders.items() if isinstance(about, dict)}
    yield from _baselines(values, described)
    if any("pretrain" in about for about in described.values()):
        yield from _basis_image(values)


def _baselines(
    values: Mapping[str, Any], contenders: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    if any("file" in about for about in contenders.values()):
        return  # a file may say itself what it is called
    labels = {str(_overrides(about).get("LABEL", key)): key for key, about in contenders.items()}
    if any("arch" in about for about in contenders.values()):
        labels.setdefault(RANDOM, RANDOM)
    given = values.get("baseline")
    for baseline in given if isinstance(given, list) else []:
        method = re.split("[@,]", str(baseline))[0]
        if method in labels or ROW_KEY.fullmatch(str(baseline)):
            if method == str(baseline) and _has_lengths(values, labels.get(method, "")):
                yield (
                    f"baseline: {baseline} is trained for several lengths: name the epochs of one, "
                    f"as in {baseline}@30."
                )
            continue
        near = difflib.get_close_matches(method, labels, n=1)
        if method in contenders:
            near = [str(_overrides(contenders[method])["LABEL"])]  # what its rows are called
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(labels)}."
        yield f"baseline: {baseline} is the label of no contender; {hint}"


def _has_lengths(values: Mapping[str, Any], key: str) -> bool:
    """Return whether a contender is pretrained several times, for several lengths."""
    about, steps = values["contenders"].get(key), values.get("steps")
    if not isinstance(about, dict) or not isinstance(steps, dict) or key not in steps:
        return False
    lengths = about.get("lengths", values.get("lengths", ()))
    return isinstance(lengths, list | dict) and len(lengths) > 1


def _basis_image(values: Mapping[str, Any]) -> Iterator[str]:
    image, shapes = values.get("basis_image"), values.get("shapes")
    if not isinstance(image, str) or not image or Path(image).is_file():
        return
    drawn = shapes.get("output_dir", SHAPES_FOLDER) if isinstance(shapes, dict) and shapes else None
    if drawn is None or not Path(image).is_relative_to(str(drawn)):
        yield f"basis_image: {image}: no such file. Name an image, or remove the key."


def _overrides(about: Mapping[str, Any]) -> Mapping[str, Any]:
    found = about.get("overrides")
    return found if isinstance(found, dict) else {}
