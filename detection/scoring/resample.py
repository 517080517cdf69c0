"""The AP on resamples of the test images, for confidence intervals of differences.

The resamples depend only on the number of images, so two detectors on one set are paired.
Detections are matched once; a resample weights each image by how often it was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from detection.scoring import coco101, voc07
from detection.scoring.boxes import Array, Detections, GroundTruth, fitted
from detection.scoring.result import CURVE_RECALLS, Marks

DRAWS = 500
AT_ONCE = 50  # bounds the memory of classes with hundreds of thousands of detections
DIGITS = 3

Average = Callable[[Array, Array], Array]


def _101_points(recall: Array, envelope: Array) -> Array:
    return voc07.sampled(recall, envelope, CURVE_RECALLS).mean(axis=1)


# scorer: (how it marks detections, its mean over recall)
RESAMPLED: dict[str, tuple[Callable[[Detections, GroundTruth], Iterator[Marks]], Average]] = {
    voc07.NAME: (voc07.class_marks, voc07.eleven_points),
    voc07.NAME_2010: (voc07.class_marks, voc07.area),
    coco101.NAME: (coco101.class_marks, _101_points),
}


def resampled_ap(scorer: str, detections: Detections, truth: GroundTruth) -> list[float]:
    """Return the AP (percent) on each resample that has an object."""
    class_marks, average = RESAMPLED[scorer]
    weights = draws(len(truth.image_ids))
    easy = ~truth.difficult
    totals, present = np.zeros(len(weights)), np.zeros(len(weights))
    for category, marks in enumerate(class_marks(fitted(detections, truth), truth)):
        objects = truth.image[easy & (truth.category == category)]
        per_image = np.bincount(objects, minlength=weights.shape[1])
        counts = weights @ per_image  # (draws,) objects to be found
        parts = range(0, len(weights), AT_ONCE)
        aps = [
            _weighted(marks, weights[i : i + AT_ONCE], counts[i : i + AT_ONCE], average)
            for i in parts
        ]
        totals += np.where(counts > 0, np.concatenate(aps), 0.0)
        present += counts > 0
    found = 100 * totals[present > 0] / present[present > 0]
    return [round(float(ap), DIGITS) for ap in found]


def draws(images: int) -> Array:
    """Return how often each image is in each resample: (DRAWS, images)."""
    chance = np.random.RandomState(0)  # stable across numpy versions
    drawn = chance.randint(images, size=(DRAWS, images))
    return np.stack([np.bincount(row, minlength=images) for row in drawn])


def _weighted(marks: Marks, weights: Array, counts: Array, average: Average) -> Array:
    """Return the AP (draws,), averaged over thresholds, for weights (draws, images).

    Hits are the only points a curve needs: they alone change the recall, and the best precision
    from any point on is that of a hit.
    """
    of_detection = weights[:, marks.image]  # (draws, N)
    seen = np.cumsum(of_detection, axis=1)
    total = np.zeros(len(weights))
    for hit, miss in zip(marks.hit, marks.miss, strict=True):
        at = np.flatnonzero(hit)
        hits = np.cumsum(of_detection[:, at], axis=1)
        counted = hit | miss
        among = seen if counted.all() else np.cumsum(of_detection * counted, axis=1)
        precision = hits / np.maximum(among[:, at], 1)
        envelope = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        total += average(hits / np.maximum(counts, 1)[:, None], envelope)
    return total / len(marks.hit)
