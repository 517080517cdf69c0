"""Collect one inference pass over all ranks, save it, and score it with every scorer."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.evaluation import DatasetEvaluator
from detectron2.utils import comm

from detection.data.catalog import ground_truth_of
from detection.errors import DetectionError
from detection.scoring import SCORERS, ScorerResult, as_table, score
from detection.scoring.boxes import GroundTruth, make_detections, write_table

DETECTIONS_FILE = "detections.npz"
GROUND_TRUTH_FILE = "ground_truth.npz"

Found = dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]  # image id: boxes, scores, classes


class SavedPassEvaluator(DatasetEvaluator):
    """An evaluator for Detectron2's `inference_on_dataset(model, loader, this)`.

    The scorer named first gives the `bbox` entry of the result, the others have their own. All
    of it, curves too, is in `scores`; the files in `output_dir` can be scored again.
    """

    def __init__(
        self,
        dataset_name: str,
        output_dir: str | Path | None = None,
        scorers: Sequence[str] = tuple(SCORERS),
        ground_truth: GroundTruth | None = None,
    ) -> None:
        self.dataset_name = dataset_name
        self.output_dir = None if output_dir is None else Path(output_dir)
        self.scorers = tuple(scorers)
        self.scores: dict[str, ScorerResult] = {}
        self._truth = ground_truth
        if self._truth is None and comm.is_main_process():
            self._truth = ground_truth_of(dataset_name)  # now: a bad file must not cost a pass
        self._found: Found = {}

    def reset(self) -> None:
        """Forget what was collected."""
        self._found = {}
        self.scores = {}

    def process(self, inputs: Sequence[Mapping[str, Any]], outputs: Sequence[Any]) -> None:
        """Collect the boxes of some images."""
        for image, output in zip(inputs, outputs, strict=True):
            instances = output["instances"].to("cpu")
            self._found[str(image["image_id"])] = (
                instances.pred_boxes.tensor.float().numpy().copy(),
                instances.scores.float().numpy().copy(),
                instances.pred_classes.numpy().copy(),
            )

    def evaluate(self) -> OrderedDict[str, dict[str, float]] | None:
        """Save and score what all ranks have collected; return None on ranks other than 0."""
        gathered = comm.gather(self._found, dst=0)
        if not comm.is_main_process():
            return None
        assert self._truth is not None
        found: Found = {image: boxes for part in gathered for image, boxes in part.items()}
        missing = [image for image in self._truth.image_ids if image not in found]
        if missing:
            raise DetectionError(
                f"The pass over {self.dataset_name} saw {len(found)} of its "
                f"{len(self._truth.image_ids)} images (not {missing[0]}, for one). Run it over the "
                "whole set: a score on a part of it cannot be compared."
            )
        order = {image: index for index, image in enumerate(self._truth.image_ids)}
        # In the order of the set, so that ties are the same on any number of ranks.
        ordered = dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))
        detections = make_detections(
            self.dataset_name, self._truth.class_names, ordered, self._truth.fingerprint
        )
        if self.output_dir is not None:
            write_table(detections, self.output_dir / DETECTIONS_FILE)
            write_table(self._truth, self.output_dir / GROUND_TRUTH_FILE)
        self.scores = score(detections, self._truth, self.scorers)
        logging.getLogger(__name__).info("%s\n%s", self.dataset_name, as_table(self.scores))
        return _in_detectron2_format(self.scores)


def _in_detectron2_format(scores: Mapping[str, ScorerResult]) -> OrderedDict[str, dict[str, float]]:
    """Return task → name → number; the first scorer is the task `bbox`, unknown numbers are nan."""
    results: OrderedDict[str, dict[str, float]] = OrderedDict()
    for number, (scorer, result) in enumerate(scores.items()):
        numbers = {
            name: float("nan") if value is None else value
            for name, value in result.items()
            if value is None or isinstance(value, float)
        }
        numbers |= {f"AP-{name}": row["AP"] for name, row in result["per_class"].items()}
        numbers |= {f"AP-{name}": float("nan") for name in result["absent_classes"]}
        results["bbox" if number == 0 else scorer] = numbers
    return results
