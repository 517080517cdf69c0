"""Score a saved inference pass by every scorer; neither a model nor Detectron2 is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from detection.errors import DetectionError
from detection.scoring import coco101, voc07
from detection.scoring.boxes import Detections, GroundTruth, fitted
from detection.scoring.result import MASK_SCORER, ScorerResult, as_table, metrics_of

__all__ = [
    "BOX_SCORERS",
    "SCORERS",
    "ScorerResult",
    "as_table",
    "metrics_of",
    "score",
    "scorers_for",
]

Scorer = Callable[[Detections, GroundTruth], ScorerResult]
# Scorers of boxes; a protocol's headline is one of them.
BOX_SCORERS: dict[str, Scorer] = {
    voc07.NAME: voc07.score_voc07,
    voc07.NAME_2010: voc07.score_voc10,
    coco101.NAME: coco101.score_coco101,
}
SCORERS: dict[str, Scorer] = BOX_SCORERS | {MASK_SCORER: coco101.score_coco101_masks}


def scorers_for(masks: bool, headline: str = "") -> tuple[str, ...]:
    """Return all scorers, the headline first; that of masks where there are any."""
    names = [*BOX_SCORERS, *([MASK_SCORER] if masks else [])]
    return tuple(sorted(names, key=lambda name: name != headline))


def score(
    detections: Detections,
    ground_truth: GroundTruth,
    scorers: Sequence[str] = (),
    same_annotations: bool = True,
) -> dict[str, ScorerResult]:
    """Return AP, AP50, AP75 (percent), those of each class, curves and absent classes per scorer.

    Without names, all scorers that apply. The annotations must be those that the detections were
    made with, unless `same_annotations` is False (because they were corrected since, say); images
    and classes must agree in any case.
    """
    scorers = scorers or scorers_for(detections.masks is not None)
    known = detections.ground_truth
    if same_annotations and known and known != ground_truth.fingerprint:
        raise DetectionError(
            f"The annotations of {ground_truth.dataset} have changed since {detections.dataset} "
            f"was evaluated (fingerprint {known} then, {ground_truth.fingerprint} now): numbers "
            "from then and now cannot be compared. Restore them, or score with the changed ones "
            "(--changed-annotations)."
        )
    in_order = fitted(detections, ground_truth)
    return {name: SCORERS[name](in_order, ground_truth) for name in scorers}
