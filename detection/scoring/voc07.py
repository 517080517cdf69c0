"""`voc07-11pt`: the AP of MoCo's and the paper's VOC tables, equal to Detectron2's evaluator.

11-point AP, averaged over IoU 0.50 … 0.95; difficult objects neither help nor hurt. Detectron2's
conventions are kept to the digit: scores rounded to 3 decimals and boxes to 1, a pixel added to
widths and heights, an overlap must be above (not at) the threshold, and a detection stands for the
object it overlaps most, matched or not. Two deviations: equal scores keep the order of the images
(Detectron2's sort leaves it to chance), and a class without objects is left out of the mean.

That last-but-one convention is why no matching loop is needed: which object a detection stands for
does not depend on the threshold or on other detections. Of the detections of one object, in order
of score, the first to pass a threshold is the hit at that threshold; so it is enough to know how
many thresholds each passes and how many the best before it passed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from detection.scoring.boxes import Array, Detections, GroundTruth
from detection.scoring.result import CURVE_RECALLS, Marks, ScorerResult, summarize

NAME = "voc07-11pt"
NAME_2010 = "voc10-every-point"
IOU_THRESHOLDS = np.array([percent / 100.0 for percent in range(50, 100, 5)])
RECALL_POINTS = np.arange(0.0, 1.1, 0.1)  # their float errors are Detectron2's too
PAIRS_AT_ONCE = 2_000_000  # bounds the memory of sets with hundreds of boxes per image


def score_voc07(detections: Detections, truth: GroundTruth) -> ScorerResult:
    """Score detections that are in the order of the ground truth (see `boxes.fitted`)."""
    return score_by(eleven_points, detections, truth)


def score_voc10(detections: Detections, truth: GroundTruth) -> ScorerResult:
    """Score in the same way, but by the area under the precision envelope: VOC 2010 and later.

    It is what Detectron2's evaluator computes for the year 2012.
    """
    return score_by(area, detections, truth)


def area(recall: Array, envelope: Array) -> Array:
    """Return the area under each curve: (n, N) and (n, N) to (n,)."""
    return (np.diff(recall, axis=1, prepend=0.0) * envelope).sum(axis=1)


def eleven_points(recall: Array, envelope: Array) -> Array:
    """Return the 11-point AP of each curve, (n, N) and (n, N) to (n,)."""
    return sampled(recall, envelope, RECALL_POINTS).mean(axis=1)


def score_by(
    average: Callable[[Array, Array], Array], detections: Detections, truth: GroundTruth
) -> ScorerResult:
    """Match as VOC does; `average` makes the APs (10,) of recalls and precisions, both (10, N)."""
    counts = np.bincount(truth.category[~truth.difficult], minlength=len(truth.class_names))
    per_class, curves = [], []
    for count, marks in zip(counts, class_marks(detections, truth), strict=True):
        recall, envelope = _precision_envelope(marks.hit, marks.miss, count)
        per_class.append(average(recall, envelope))
        curves.append(sampled(recall, envelope, CURVE_RECALLS))
    return summarize(truth.class_names, counts, np.array(per_class), np.array(curves))


def class_marks(detections: Detections, truth: GroundTruth) -> Iterator[Marks]:
    """Yield the marks of each class's detections, highest score first."""
    overlaps, objects = best_overlaps(detections, truth)
    # passes[d]: how many of the ten thresholds detection d passes with its object
    passes = np.searchsorted(IOU_THRESHOLDS, overlaps, side="left")
    scores = _rounded(detections.scores, 1000.0)
    order = np.lexsort((-scores, detections.category))  # stable: ties keep the order of images
    passes, objects = passes[order], objects[order]
    before = _best_before(passes, objects)
    image = detections.image[order]
    ends = np.searchsorted(detections.category[order], np.arange(len(truth.class_names) + 1))
    for start, end in itertools.pairwise(ends):
        mine = slice(start, end)
        hit, miss = _marks(passes[mine], before[mine], objects[mine], truth.difficult)
        yield Marks(image[mine], hit, miss)


def best_overlaps(detections: Detections, truth: GroundTruth) -> tuple[Array, Array]:
    """Return the largest IoU of each detection with an object of its image and class, and which.

    0 and -1 if there is none; of equal overlaps the first object counts.
    """
    num_classes = len(truth.class_names)
    group = detections.image * num_classes + detections.category
    truth_group = truth.image * num_classes + truth.category
    by_group = np.argsort(truth_group, kind="stable")
    first = np.searchsorted(truth_group[by_group], group, side="left")
    count = np.searchsorted(truth_group[by_group], group, side="right") - first
    overlaps = np.zeros(len(detections))
    objects = np.full(len(detections), -1)
    rows = np.flatnonzero(count)
    found, wanted = _pixels(detections), _truth_pixels(truth)
    for part in _parts(rows, count[rows]):
        counts = count[part]
        starts = np.cumsum(counts) - counts
        within = np.arange(counts.sum()) - np.repeat(starts, counts)
        candidates = by_group[np.repeat(first[part], counts) + within]
        owners = np.repeat(part, counts)
        iou = _iou(found[owners], wanted[candidates])
        overlaps[part] = np.maximum.reduceat(iou, starts)
        best = np.flatnonzero(iou == overlaps[owners])[::-1]  # reversed: the first is written last
        objects[owners[best]] = candidates[best]
    return overlaps, objects


def _parts(rows: Array, counts: Array) -> list[Array]:
    """Split the rows into runs of a bounded number of pairs."""
    if not len(rows):
        return []
    cuts = np.flatnonzero(np.diff(np.cumsum(counts) // PAIRS_AT_ONCE)) + 1
    return np.split(rows, cuts)


def _pixels(detections: Detections) -> Array:
    """Return the boxes as Detectron2 writes them to its result files: from 1, one decimal."""
    boxes = detections.boxes.copy()  # float32: the pixel is added before widening, as there
    boxes[:, :2] += 1
    return _rounded(boxes, 10.0)


def _truth_pixels(truth: GroundTruth) -> Array:
    boxes = truth.boxes.copy()
    boxes[:, :2] += 1
    return boxes


def _rounded(values: Array, scale: float) -> Array:
    """Round as printing does: a float32 times the scale is exact in float64, so ties are ties."""
    return np.rint(values.astype(np.float64) * scale) / scale


def _iou(a: Array, b: Array) -> Array:
    """Return the IoU of each row with the added pixel; the order of operations decides ties."""
    width = np.maximum(np.minimum(b[:, 2], a[:, 2]) - np.maximum(b[:, 0], a[:, 0]) + 1.0, 0.0)
    height = np.maximum(np.minimum(b[:, 3], a[:, 3]) - np.maximum(b[:, 1], a[:, 1]) + 1.0, 0.0)
    shared = width * height
    area_a = (a[:, 2] - a[:, 0] + 1.0) * (a[:, 3] - a[:, 1] + 1.0)
    area_b = (b[:, 2] - b[:, 0] + 1.0) * (b[:, 3] - b[:, 1] + 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(shared / (area_a + area_b - shared), nan=0.0)


def _best_before(passes: Array, objects: Array) -> Array:
    """Return the most thresholds that an earlier detection of the same object passes, or 0."""
    order = np.argsort(objects, kind="stable")
    level = objects[order] * 16 + passes[order]  # a running maximum that restarts for each object
    highest = np.maximum.accumulate(level)
    starts_object = np.ones(len(order), bool)
    starts_object[1:] = objects[order][1:] != objects[order][:-1]
    before = np.zeros(len(order), np.int64)
    before[1:] = highest[:-1] - objects[order][1:] * 16
    before[starts_object] = 0
    result = np.empty_like(before)
    result[order] = before
    return result


def _marks(passes: Array, before: Array, objects: Array, difficult: Array) -> tuple[Array, Array]:
    """Return (hit, miss), each (10, N): per threshold a hit, a miss, or neither (difficult)."""
    level = np.arange(len(IOU_THRESHOLDS))[:, None]
    above = passes > level
    spared = difficult[objects] & (objects >= 0) if len(difficult) else np.zeros(len(objects), bool)
    hit = above & (before <= level) & ~spared
    return hit, ~hit & ~(above & spared)


def _precision_envelope(hit: Array, miss: Array, count: int) -> tuple[Array, Array]:
    """Return recall after each detection and the best precision from there on, both (10, N)."""
    hits, misses = np.cumsum(hit, axis=1), np.cumsum(miss, axis=1)
    precision = hits / np.maximum(hits + misses, 1)
    envelope = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    return hits / max(count, 1), envelope


def sampled(recall: Array, envelope: Array, levels: Any) -> Array:
    """Return the envelope at each level of recall, 0 at levels never reached: (n, levels)."""
    ended = np.concatenate([envelope, np.zeros((len(envelope), 1))], axis=1)
    return np.stack(
        [
            row[np.searchsorted(reached, levels, side="left")]
            for reached, row in zip(recall, ended, strict=True)
        ]
    )
