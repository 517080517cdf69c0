"""Score a saved inference pass by every scorer; neither a model nor Detectron2 is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from detection.scoring import coco101, voc07
from detection.scoring.boxes import Detections, GroundTruth, fitted
from detection.scoring.result import MASK_SCORER, ScorerResult, as_table, metrics_of
from kscl.errors import KsclError

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
# A protocol's headline is one of these.
BOX_SCORERS: dict[str, Scorer] = {
    voc07.NAME: voc07.score_voc07,
    voc07.NAME_2010: voc07.score_voc10,
    coco101.NAME: coco101.score_coco101,
}
SCORERS: dict[str, Scorer] = BOX_SCORERS | {MASK_SCORER: coco101.score_coco101_masks}


def scorers_for(masks: bool, headline: str = "") -> tuple[str, ...]:
    """Return all scorers, the headline first, with that of masks if there are masks."""
    names = [*BOX_SCORERS, *([MASK_SCORER] if masks else [])]
    return tuple(sorted(names, key=lambda name: name != headline))


def score(
    detections: Detections,
    ground_truth: GroundTruth,
    scorers: Sequence[str] = (),
    same_annotations: bool = True,
) -> dict[str, ScorerResult]:
    """Return AP, AP50, AP75 (percent), per-class APs, curves and absent classes per scorer.

    Without names, use all scorers that apply. The annotations must not have changed since the
    detections were made, unless `same_annotations` is False; images and classes must always match.
    """
    scorers = scorers or scorers_for(detections.masks is not None)
    known = detections.ground_truth
    if same_annotations and known and known != ground_truth.fingerprint:
        raise KsclError(
            f"The annotations of {ground_truth.dataset} have changed since {detections.dataset} "
            f"was evaluated (fingerprint {known} then, {ground_truth.fingerprint} now), so the "
            "numbers are not comparable. Restore them, or use --changed-annotations."
        )
    in_order = fitted(detections, ground_truth)
    return {name: SCORERS[name](in_order, ground_truth) for name in scorers}
