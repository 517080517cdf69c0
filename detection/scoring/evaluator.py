"""Collect one inference pass from all ranks, save it, and score it with every scorer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from detectron2.evaluation import DatasetEvaluator
from detectron2.utils import comm

from detection.scoring import ScorerResult, as_table, score
from detection.scoring.boxes import (
    Array,
    GroundTruth,
    Packed,
    make_detections,
    packed_pixels,
    write_table,
)
from detection.scoring.resample import resampled_ap
from detection.scoring.result import MASK_SCORER

DETECTIONS_FILE = "detections.npz"
GROUND_TRUTH_FILE = "ground_truth.npz"

# image id: boxes, scores, classes, and a mask for each box
Found = dict[str, tuple[Array, Array, Array, list[Packed]]]

log = logging.getLogger(__name__)


class SavedPassEvaluator(DatasetEvaluator):
    """An evaluator for Detectron2's `inference_on_dataset(model, loader, this)`.

    `scores` has all scores and curves; the files in `folder` can be scored again. Masks are
    collected if the test objects have any.
    """

    def __init__(
        self, truth: GroundTruth, folder: Path | None = None, scorers: Sequence[str] = ()
    ) -> None:
        self.truth, self.folder, self.scorers = truth, folder, tuple(scorers)
        self.scores: dict[str, ScorerResult] = {}
        self.found: Found = {}

    def reset(self) -> None:
        self.found, self.scores = {}, {}

    def process(self, inputs: Sequence[Mapping[str, Any]], outputs: Sequence[Any]) -> None:
        for image, output in zip(inputs, outputs, strict=True):
            instances = output["instances"].to("cpu")
            masks = [] if self.truth.masks is None else instances.pred_masks.numpy()
            self.found[str(image["image_id"])] = (
                instances.pred_boxes.tensor.float().numpy().copy(),
                instances.scores.float().numpy().copy(),
                instances.pred_classes.numpy().copy(),
                [packed_pixels(mask) for mask in masks],
            )

    def evaluate(self) -> dict[str, float] | None:
        """Save and score what all ranks collected; return None on ranks other than 0.

        The numbers have Detectron2's names, e.g. bbox/AP50 (first scorer) and segm/AP (masks).
        """
        gathered = comm.gather(self.found, dst=0)
        if not comm.is_main_process():
            return None
        found = {image: columns for part in gathered for image, columns in part.items()}
        # In the order of the set, so that ties are the same on any number of ranks.
        ordered = {image: found[image] for image in self.truth.image_ids}
        masks = {image: columns[3] for image, columns in ordered.items()}
        detections = make_detections(
            self.truth.dataset,
            self.truth.class_names,
            {image: columns[:3] for image, columns in ordered.items()},
            self.truth.fingerprint,
            None if self.truth.masks is None else masks,
        )
        if self.folder is not None:
            write_table(detections, self.folder / DETECTIONS_FILE)
            write_table(self.truth, self.folder / GROUND_TRUTH_FILE)
        self.scores = score(detections, self.truth, self.scorers)
        headline = next(iter(self.scores))
        if self.folder is not None:  # the final evaluation
            self.scores[headline]["resampled_AP"] = resampled_ap(headline, detections, self.truth)
        log.info("%s\n%s", self.truth.dataset, as_table(self.scores))
        return _by_detectron2s_names(self.scores)


def _by_detectron2s_names(scores: Mapping[str, ScorerResult]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for number, (scorer, result) in enumerate(scores.items()):
        task = "bbox" if number == 0 else "segm" if scorer == MASK_SCORER else scorer
        named = {name: value for name, value in result.items() if isinstance(value, float)}
        named |= {f"AP-{name}": row["AP"] for name, row in result["per_class"].items()}
        numbers |= {f"{task}/{name}": value for name, value in named.items()}
    return numbers
