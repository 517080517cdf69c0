"""`coco-101pt` and `coco-101pt-segm`: COCO's AP by pycocotools, difficult objects as crowds.

101-point AP of boxes or masks, averaged over IoU 0.50 … 0.95, also by object size, and the average
recall of the best 1, 10 or 100 detections per image.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from detection.scoring.boxes import Array, BoxTable, Detections, GroundTruth
from detection.scoring.result import MASK_SCORER, Marks, ScorerResult, summarize
from kscl.errors import KsclError

NAME = "coco-101pt"
SIZES = {"APs": "small", "APm": "medium", "APl": "large"}
RECALLS = {"AR1": 1, "AR10": 10, "AR100": 100}  # name: detections per image


def score_coco101(detections: Detections, truth: GroundTruth) -> ScorerResult:
    """Score boxes in the order of the ground truth (see `boxes.fitted`)."""
    return _score("bbox", detections, truth)


def score_coco101_masks(detections: Detections, truth: GroundTruth) -> ScorerResult:
    """Score masks in the order of the ground truth (see `boxes.fitted`)."""
    for table in (detections, truth):
        if table.masks is None:
            raise KsclError(
                f"{table.dataset} has no masks to score. Leave {MASK_SCORER} out, or use a "
                "detector and a set with masks."
            )
    _check_sizes(detections, truth)
    return _score("segm", detections, truth)


def class_marks(detections: Detections, truth: GroundTruth) -> Iterator[Marks]:
    """Yield the marks of each class's boxes in the order of pycocotools' `accumulate`."""
    evaluation = _matched("bbox", detections, truth, sizes=("all",))
    images = len(truth.image_ids)
    for category in range(len(truth.class_names)):
        of_class = evaluation.evalImgs[category * images : (category + 1) * images]
        found = [(image, entry) for image, entry in enumerate(of_class) if entry is not None]
        count = [len(entry["dtScores"]) for _, entry in found]
        image = np.repeat(np.array([image for image, _ in found], np.int64), count)
        scores = np.concatenate([np.zeros(0), *(entry["dtScores"] for _, entry in found)])
        none = np.zeros((len(evaluation.params.iouThrs), 0), bool)
        matched = np.concatenate([none, *(entry["dtMatches"] > 0 for _, entry in found)], axis=1)
        ignored = [entry["dtIgnore"].astype(bool) for _, entry in found]
        counted = ~np.concatenate([none, *ignored], axis=1)
        order = np.argsort(-scores, kind="mergesort")
        yield Marks(image[order], (matched & counted)[:, order], (~matched & counted)[:, order])


def _matched(
    task: str, detections: Detections, truth: GroundTruth, sizes: Sequence[str] = ()
) -> Any:
    """Return pycocotools' evaluation after matching, for these sizes or for all."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    wanted, found = _entries(truth, task), _entries(detections, task)
    for row, entry in enumerate(wanted):  # ids begin at 1 because 0 means none
        crowd, area = int(truth.difficult[row]), float(truth.areas[row])
        entry |= {"id": row + 1, "iscrowd": crowd, "area": area}
    for entry, score in zip(found, detections.scores.tolist(), strict=True):
        entry["score"] = score
    annotated = COCO()
    annotated.dataset = {
        "images": [
            {"id": index + 1, "height": 0, "width": 0} for index in range(len(truth.image_ids))
        ],
        "categories": [{"id": index + 1} for index in range(len(truth.class_names))],
        "annotations": wanted,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        annotated.createIndex()
        results = annotated.loadRes(found) if found else COCO()  # loadRes needs one
        evaluation = COCOeval(annotated, results, task)
        if sizes:
            known = dict(zip(evaluation.params.areaRngLbl, evaluation.params.areaRng, strict=True))
            evaluation.params.areaRngLbl = list(sizes)
            evaluation.params.areaRng = [known[name] for name in sizes]
        evaluation.evaluate()
    return evaluation


def _score(task: str, detections: Detections, truth: GroundTruth) -> ScorerResult:
    evaluation = _matched(task, detections, truth)
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.accumulate()
    # (thresholds, recalls, classes, sizes), -1 where a class has no object of that size
    precision = evaluation.eval["precision"][..., -1]
    by_size = dict(zip(evaluation.params.areaRngLbl, np.moveaxis(precision, 3, 0), strict=True))
    # (thresholds, classes) of all sizes, by the number of detections per image
    recall = evaluation.eval["recall"][:, :, 0]
    by_count = dict(zip(evaluation.params.maxDets, np.moveaxis(recall, 2, 0), strict=True))
    counts = np.bincount(truth.category[~truth.difficult], minlength=len(truth.class_names))
    curves = np.moveaxis(by_size["all"], 2, 0)  # (classes, thresholds, recalls)
    result = summarize(truth.class_names, counts, curves.mean(axis=2), curves)
    tables = {name: by_size[label] for name, label in SIZES.items()}
    tables |= {name: by_count[count] for name, count in RECALLS.items()}
    for index, name in enumerate(truth.class_names):
        if name in result["per_class"]:
            of_class = {key: _mean_of_known(table[..., index]) for key, table in tables.items()}
            result["per_class"][name] |= of_class
    return result | {key: _mean_of_known(table) for key, table in tables.items()}


def _check_sizes(detections: Detections, truth: GroundTruth) -> None:
    """Raise an error if a mask was made for another size of its image."""
    assert detections.masks is not None
    assert truth.masks is not None
    pairs = zip(truth.image.tolist(), truth.masks, strict=True)
    sizes = {image: list(mask["size"]) for image, mask in pairs}
    for image, mask in zip(detections.image.tolist(), detections.masks, strict=True):
        if list(mask["size"]) != sizes.get(image, list(mask["size"])):
            raise KsclError(
                f"{truth.dataset}: the masks of image {truth.image_ids[image]} are {sizes[image]} "
                f"(height, width), but {list(mask['size'])} in the detections. Score them with "
                "their own annotations."
            )


def _entries(table: BoxTable, task: str) -> list[dict[str, Any]]:
    """Return a table's boxes or masks as pycocotools has them."""
    # Sizes in the boxes' own precision, as in Detectron2's COCO evaluator.
    boxes = np.concatenate([table.boxes[:, :2], table.boxes[:, 2:] - table.boxes[:, :2]], axis=1)
    name, shapes = "bbox", boxes.tolist()
    if task == "segm":
        name, shapes = "segmentation", table.masks
    rows = zip(table.image.tolist(), table.category.tolist(), shapes, strict=True)
    return [
        {"image_id": image + 1, "category_id": category + 1, name: shape}
        for image, category, shape in rows
    ]


def _mean_of_known(precision: Array) -> float | None:
    known = precision[precision > -1]
    return 100.0 * float(known.mean()) if known.size else None
