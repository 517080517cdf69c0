"""What every scorer returns (means, classes, curves), and its table as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tabulate import tabulate

from detection.scoring.boxes import Array
from kscl.errors import KsclError

ScorerResult = dict[str, Any]

MASK_SCORER = "coco-101pt-segm"
MASK_PREFIX = "mask/"  # of its numbers in a record
NUMBERS = ("AP", "AP50", "AP75")
CURVE_RECALLS = np.linspace(0.0, 1.0, 101)
# Lines of the table that only some scorers have: title, and a word per number.
MORE = {
    "AP by size": {"APs": "small", "APm": "medium", "APl": "large"},
    "AR by detections per image": {"AR1": "1", "AR10": "10", "AR100": "100"},
}
CURVE_IOUS = {"AP50": 0, "AP75": 5}  # name: index of one of the ten thresholds


@dataclass(frozen=True)
class Marks:
    """The N detections of a class at ten IoU thresholds, highest score first."""

    image: Array  # (N,) index of the image
    hit: Array  # (10, N) bool
    miss: Array  # (10, N) bool; neither for a difficult object or a crowd


def summarize(
    class_names: Sequence[str],
    counts: Array,  # (classes,) objects to be found
    per_class: Array,  # (classes, 10) AP in [0, 1] at each threshold
    curves: Array,  # (classes, 10, 101) precision at CURVE_RECALLS
) -> ScorerResult:
    """Return percentages; a class without objects has no AP and is left out of all means."""
    present = [index for index, count in enumerate(counts) if count]
    if not present:
        raise KsclError(
            "There is nothing to score: the ground truth has only difficult objects, or none. "
            "Score on a split with objects."
        )
    percent = 100.0 * per_class
    return {
        **_means(percent[present].mean(axis=0)),
        "per_class": {
            class_names[index]: {**_means(percent[index]), "objects": int(counts[index])}
            for index in present
        },
        "absent_classes": [
            name for name, count in zip(class_names, counts, strict=True) if not count
        ],
        "curves": {
            "recall": [round(float(level), 2) for level in CURVE_RECALLS],
            "precision": {
                class_names[index]: {
                    name: [round(float(value), 4) for value in curves[index, iou]]
                    for name, iou in CURVE_IOUS.items()
                }
                for index in present
            },
        },
    }


def metrics_of(scores: Mapping[str, ScorerResult], headline: str) -> dict[str, float]:
    """Return the numbers for a record: the headline scorer's, and the others' with a prefix."""
    metrics = {}
    for scorer in sorted(scores, key=lambda name: name != headline):
        prefix = "" if scorer == headline else f"{scorer}/"
        prefix = MASK_PREFIX if scorer == MASK_SCORER else prefix
        for name, value in scores[scorer].items():
            if isinstance(value, float):
                metrics[f"{prefix}{name}"] = value
    return metrics


def as_table(scores: Mapping[str, ScorerResult]) -> str:
    """Return one block per scorer: the mean first, then every class, then the absent classes."""
    blocks = []
    for scorer, result in scores.items():
        rows = {"mean": result, **result["per_class"]}
        table = [
            [name, *(f"{row[key]:.2f}" for key in NUMBERS), row.get("objects", "")]
            for name, row in rows.items()
        ]
        lines = [
            tabulate(
                table,
                [scorer, *NUMBERS, "objects"],
                tablefmt="plain",
                disable_numparse=True,
                colalign=("left", "right", "right", "right", "right"),
            )
        ]
        for title, names in MORE.items():
            further = [
                f"{text} {'–' if result[key] is None else format(result[key], '.2f')}"
                for key, text in names.items()
                if key in result
            ]
            lines += [f"{title}: {', '.join(further)}"] if further else []
        if result["absent_classes"]:
            absent = ", ".join(result["absent_classes"])
            lines.append(f"Left out of the mean (no test objects): {absent}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def per_class_numbers(scores: Mapping[str, ScorerResult]) -> dict[str, dict[str, Any]]:
    """Return scorer → class → numbers, without missing ones."""
    return {
        scorer: {
            name: {key: value for key, value in row.items() if value is not None}
            for name, row in result["per_class"].items()
        }
        for scorer, result in scores.items()
    }


def _means(by_threshold: Array) -> dict[str, float]:
    return {
        "AP": float(by_threshold.mean()),
        "AP50": float(by_threshold[0]),
        "AP75": float(by_threshold[5]),
    }
