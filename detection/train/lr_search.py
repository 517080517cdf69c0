"""The learning rate chosen per backbone: on a part of the training images, never on the test set.

Published numbers often hide such a search. Here it is a protocol of its own: its name says so, its
grid is part of it, and the record says what every learning rate reached.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode

from detection.data.sets import Part, RunSets
from detection.errors import DetectionError
from kscl.data.annotations import AnnotatedImage
from kscl.records.record import RECORD_FILE, read_record

GRID_KEY = "KSCL.LR_GRID"
SEARCH_FOLDER = "lr_search"
TRIAL = "-lr-trial"  # what the protocol's name ends in while one learning rate is tried
HELD_OUT = 5  # one of so many training images is held out to choose on
METRIC = "AP"


def parse_grid(text: str) -> list[float]:
    """Return the learning rates of `--lr-grid 0.01,0.02`."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    return check_grid(rates, f"--lr-grid {text}")


def check_grid(rates: list[float], where: str) -> list[float]:
    """Return the learning rates; raise an error unless there are several different ones."""
    good = all(math.isfinite(rate) and rate > 0 for rate in rates)
    if not good or len(rates) < 2 or len(set(rates)) != len(rates):
        raise DetectionError(
            f"{where}: give at least two different learning rates above 0, such as 0.01,0.02,0.04."
        )
    return [float(rate) for rate in rates]


def images_to_divide(train: Sequence[Part]) -> list[AnnotatedImage]:
    """Return all training images; raise an error if they are too few to hold one out."""
    images = [image for _, annotated in train for image in annotated.images]
    if len(images) < HELD_OUT:
        raise DetectionError(
            f"{GRID_KEY}: of {len(images)} training images none can be held out to choose a "
            f"learning rate on. Use at least {HELD_OUT}."
        )
    return images


def search_sets(sets: RunSets) -> RunSets:
    """Return the training sets in two parts: to train on, and to choose the learning rate on."""
    images = images_to_divide(sets.train)
    order = sorted(images, key=lambda image: (zlib.crc32(str(image.id).encode()), str(image.id)))
    held_out = {id(image) for image in order[: len(order) // HELD_OUT]}
    train = [
        (source, replace(annotated, images=[i for i in annotated.images if id(i) not in held_out]))
        for source, annotated in sets.train
    ]
    source, first = sets.train[0]
    chosen_on = [image for image in images if id(image) in held_out]
    if len({image.id for image in chosen_on}) < len(chosen_on):  # two sets may use the same ids
        chosen_on = [replace(image, id=str(number)) for number, image in enumerate(chosen_on)]
    fingerprint = sets.fingerprints["train"]
    return RunSets(
        sets.class_names,
        train,
        (source, replace(first, images=chosen_on)),
        {
            role: {**fingerprint, "hash": _digest(fingerprint["hash"], role)}
            for role in sets.fingerprints
        },
    )


def search(
    cfg: CfgNode, sets: RunSets, run: Callable[[CfgNode, RunSets], int]
) -> tuple[int, dict[str, Any] | None]:
    """Try every learning rate of the grid; return the exit code, and what was found if it is 0."""
    parts = search_sets(sets)
    scores: dict[str, float] = {}
    for rate in cfg.KSCL.LR_GRID:
        trial = cfg.clone()
        trial.defrost()
        trial.SOLVER.BASE_LR = rate
        trial.KSCL.LR_GRID = []
        trial.KSCL.PROTOCOL = f"{cfg.KSCL.PROTOCOL or 'unnamed'}{TRIAL}"
        trial.OUTPUT_DIR = str(Path(cfg.OUTPUT_DIR) / SEARCH_FOLDER / f"lr{rate:g}")
        trial.freeze()
        if code := run(trial, parts):
            return code, None
        scores[f"{rate:g}"] = read_record(Path(trial.OUTPUT_DIR) / RECORD_FILE)["metrics"][METRIC]
    best = max(cfg.KSCL.LR_GRID, key=lambda rate: (scores[f"{rate:g}"], -rate))
    return 0, {
        "chosen": best,
        "grid": list(cfg.KSCL.LR_GRID),
        METRIC: scores,
        "scorer": cfg.KSCL.SCORER,
        "trained_on": sum(len(annotated.images) for _, annotated in parts.train),
        "chosen_on": len(parts.test[1].images),
        "chosen_on_what": "images of the training sets, held out from the trials",
    }


def search_summary(found: dict[str, Any]) -> str:
    """Return one line on what the search found."""
    tried = ", ".join(f"{rate} gives {score:.2f}" for rate, score in found[METRIC].items())
    return (
        f"Learning rate {found['chosen']:g} of {METRIC} on {found['chosen_on']} held-out training "
        f"images: {tried}."
    )


def _digest(*parts: str) -> str:
    return hashlib.sha256(" ".join((SEARCH_FOLDER, *parts)).encode()).hexdigest()[:16]
