"""`coco-101pt`: COCO's AP by pycocotools, with difficult objects as crowds.

101-point AP averaged over IoU 0.50 … 0.95, and over small, medium and large objects.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np

from detection.scoring.boxes import Array, BoxTable, Detections, GroundTruth
from detection.scoring.result import ScorerResult, summarize

NAME = "coco-101pt"
SIZES = {"APs": "small", "APm": "medium", "APl": "large"}


def score_coco101(detections: Detections, truth: GroundTruth) -> ScorerResult:
    """Score detections that are in the order of the ground truth (see `detections.fitted`)."""
    from pycocotools.cocoeval import COCOeval

    truth_entries = _entries(truth)
    for entry, difficult, area in zip(truth_entries, truth.difficult, truth.areas, strict=True):
        entry |= {"iscrowd": int(difficult), "area": float(area)}
    found_entries = _entries(detections)
    for entry, score in zip(found_entries, detections.scores, strict=True):
        entry |= {"iscrowd": 0, "area": entry["bbox"][2] * entry["bbox"][3], "score": float(score)}
    with contextlib.redirect_stdout(io.StringIO()):  # it reports its progress there
        evaluation = COCOeval(_api(truth, truth_entries), _api(truth, found_entries), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    # (thresholds, recalls, classes, sizes), -1 where a class has no object of that size
    precision = evaluation.eval["precision"][..., -1]
    by_size = dict(zip(evaluation.params.areaRngLbl, np.moveaxis(precision, 3, 0), strict=True))
    counts = np.bincount(truth.category[~truth.difficult], minlength=len(truth.class_names))
    curves = np.moveaxis(by_size["all"], 2, 0)  # (classes, thresholds, recalls)
    result = summarize(truth.class_names, counts, curves.mean(axis=2), curves)
    return result | {name: _mean_of_known(by_size[label]) for name, label in SIZES.items()}


def _entries(table: BoxTable) -> list[dict[str, Any]]:
    """Return annotations for pycocotools; its ids begin at 1, because 0 means none there."""
    # Sizes in the boxes' own precision, as Detectron2's COCO evaluator computes them.
    boxes = np.concatenate([table.boxes[:, :2], table.boxes[:, 2:] - table.boxes[:, :2]], axis=1)
    return [
        {"id": row + 1, "image_id": image + 1, "category_id": category + 1, "bbox": box}
        for row, (image, category, box) in enumerate(
            zip(table.image.tolist(), table.category.tolist(), boxes.tolist(), strict=True)
        )
    ]


def _api(truth: GroundTruth, entries: list[dict[str, Any]]) -> Any:
    from pycocotools.coco import COCO

    api = COCO()
    api.dataset = {
        "images": [{"id": index + 1} for index in range(len(truth.image_ids))],
        "categories": [{"id": index + 1} for index in range(len(truth.class_names))],
        "annotations": entries,
    }
    api.createIndex()
    return api


def _mean_of_known(precision: Array) -> float | None:
    known = precision[precision > -1]
    return 100.0 * float(known.mean()) if known.size else None
