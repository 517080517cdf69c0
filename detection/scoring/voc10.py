"""`voc10-every-point`: the AP of VOC 2010 and later, the area under the precision envelope.

Detections are matched as for `voc07-11pt`; only the mean over recall differs. It is what
Detectron2's evaluator computes for the year 2012.
"""

from __future__ import annotations

import numpy as np

from detection.scoring.boxes import Array, Detections, GroundTruth
from detection.scoring.result import ScorerResult
from detection.scoring.voc07 import score_by

NAME = "voc10-every-point"


def score_voc10(detections: Detections, truth: GroundTruth) -> ScorerResult:
    """Score detections that are in the order of the ground truth (see `boxes.fitted`)."""
    return score_by(_area, detections, truth)


def _area(recall: Array, envelope: Array) -> Array:
    """Return the area under each of the curves: (10, N) and (10, N) to (10,)."""
    return (np.diff(recall, axis=1, prepend=0.0) * envelope).sum(axis=1)
