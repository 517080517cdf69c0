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
from detection.data.masks import Packed, packed_pixels
from detection.errors import DetectionError
from detection.scoring import ScorerResult, as_table, score
from detection.scoring.boxes import GroundTruth, make_detections, write_table
from detection.scoring.resample import RESAMPLED, resampled_ap
from detection.scoring.result import MASK_SCORER

DETECTIONS_FILE = "detections.npz"
GROUND_TRUTH_FILE = "ground_truth.npz"

Found = dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]  # image id: boxes, scores, classes
MaskLists = dict[str, list[Packed]]  # image id: a mask for each of its boxes


class SavedPassEvaluator(DatasetEvaluator):
    """An evaluator for Detectron2's `inference_on_dataset(model, loader, this)`.

    The scorer named first gives the `bbox` entry of the result, the one of masks `segm`, the others
    have their own. All of it, curves too, is in `scores`; the files in `output_dir` can be scored
    again. Masks are collected `with_masks`, which every test object must have then.
    """

    def __init__(
        self,
        dataset_name: str,
        output_dir: str | Path | None = None,
        scorers: Sequence[str] = (),
        ground_truth: GroundTruth | None = None,
        with_masks: bool = False,
    ) -> None:
        self.dataset_name = dataset_name
        self.output_dir = None if output_dir is None else Path(output_dir)
        self.scorers = tuple(scorers)
        self.scores: dict[str, ScorerResult] = {}
        self._truth = ground_truth
        if self._truth is None and comm.is_main_process():
            # Now: a bad file must not cost a pass.
            self._truth = ground_truth_of(dataset_name, with_masks)
        if with_masks and self._truth is not None and self._truth.masks is None:
            raise DetectionError(
                f"{dataset_name} has objects without a mask, so masks cannot be scored on it. Add "
                "them to its annotations, or set MODEL.MASK_ON False."
            )
        self._found: Found = {}
        self._masks: MaskLists | None = {} if with_masks else None

    def reset(self) -> None:
        """Forget what was collected."""
        self._found = {}
        self._masks = None if self._masks is None else {}
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
            if self._masks is not None:
                if not instances.has("pred_masks"):
                    raise DetectionError(
                        "The detector gives no masks. Set MODEL.MASK_ON True, or evaluate boxes."
                    )
                masks = instances.pred_masks.numpy()
                self._masks[str(image["image_id"])] = [packed_pixels(mask) for mask in masks]

    def evaluate(self) -> OrderedDict[str, dict[str, float]] | None:
        """Save and score what all ranks have collected; return None on ranks other than 0."""
        gathered = comm.gather((self._found, self._masks), dst=0)
        if not comm.is_main_process():
            return None
        assert self._truth is not None
        found: Found = {image: boxes for part, _ in gathered for image, boxes in part.items()}
        masks: MaskLists = {
            image: of_image for _, part in gathered for image, of_image in (part or {}).items()
        }
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
            self.dataset_name,
            self._truth.class_names,
            ordered,
            self._truth.fingerprint,
            None if self._masks is None else masks,
        )
        if self.output_dir is not None:
            write_table(detections, self.output_dir / DETECTIONS_FILE)
            write_table(self._truth, self.output_dir / GROUND_TRUTH_FILE)
        self.scores = score(detections, self._truth, self.scorers)
        headline = next(iter(self.scores))
        if headline in RESAMPLED and self.output_dir is not None:  # not on the way
            resampled = resampled_ap(headline, detections, self._truth)
            self.scores[headline]["resampled_AP"] = resampled
        logging.getLogger(__name__).info("%s\n%s", self.dataset_name, as_table(self.scores))
        return _in_detectron2_format(self.scores)


def _in_detectron2_format(scores: Mapping[str, ScorerResult]) -> OrderedDict[str, dict[str, float]]:
    """Return task → name → number, by Detectron2's names of tasks; unknown numbers are nan."""
    results: OrderedDict[str, dict[str, float]] = OrderedDict()
    for number, (scorer, result) in enumerate(scores.items()):
        numbers = {
            name: float("nan") if value is None else value
            for name, value in result.items()
            if value is None or isinstance(value, float)
        }
        numbers |= {f"AP-{name}": row["AP"] for name, row in result["per_class"].items()}
        numbers |= {f"AP-{name}": float("nan") for name in result["absent_classes"]}
        task = "segm" if scorer == MASK_SCORER else scorer
        results["bbox" if number == 0 else task] = numbers
    return results
