"""How much faster our VOC scorer is than Detectron2's evaluator, which it equals."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets.pascal_voc import register_pascal_voc
from detectron2.evaluation import PascalVOCDetectionEvaluator, pascal_voc_evaluation
from detectron2.structures import Boxes, Instances

from detection.scoring import score, voc07
from detection.scoring.boxes import make_detections
from tests.benchmarks.harness import figure, time_ratio
from tests.helpers.data.scored_sets import truth_of
from tests.helpers.data.sets import StableNumpy, random_detections, random_things, write_voc

NAME = "benchmark of scoring"
IMAGES, CLASSES, DETECTIONS = 5_000, 20, 100
CLASS_NAMES = [f"class{index}" for index in range(CLASSES)]


@figure(
    "voc07-scorer",
    f"Detectron2's VOC evaluator / ours, equal numbers: {IMAGES} images, {CLASSES} classes, "
    f"{DETECTIONS} boxes per image, predictions and annotations in memory, one run",
    at_least=10,
)
def voc07_scorer_against_detectron2() -> float:
    rng = np.random.default_rng(0)
    things = random_things(rng, IMAGES, CLASSES)
    found = random_detections(rng, things, CLASSES, most=DETECTIONS, fewest=DETECTIONS)
    with tempfile.TemporaryDirectory() as folder:
        root = write_voc(
            Path(folder), {"test": list(things)}, things, images=False, size=(300, 300)
        )
        register_pascal_voc(NAME, str(root), "test", 2007, CLASS_NAMES)
        try:
            return _ratio(root, found)
        finally:
            DatasetCatalog.remove(NAME)
            MetadataCatalog.pop(NAME, None)


def _ratio(root: Path, found: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]) -> float:
    theirs = PascalVOCDetectionEvaluator(NAME)
    theirs.reset()
    for image_id, (boxes, scores, category) in found.items():
        instances = Instances((300, 300))
        instances.pred_boxes = Boxes(torch.from_numpy(boxes))
        instances.scores = torch.from_numpy(scores)
        instances.pred_classes = torch.from_numpy(category)
        theirs.process([{"image_id": image_id}], [{"instances": instances}])
        # It keeps what it has parsed.
        pascal_voc_evaluation.parse_rec(str(root / "Annotations" / f"{image_id}.xml"))
    truth = truth_of(root, CLASS_NAMES)
    ours = make_detections(NAME, truth.class_names, found)
    results: dict[str, dict[str, float]] = {}

    def run_theirs() -> None:
        with mock.patch.object(pascal_voc_evaluation, "np", StableNumpy()):
            results["theirs"] = theirs.evaluate()["bbox"]

    def run_ours() -> None:
        results["ours"] = score(ours, truth, (voc07.NAME,))[voc07.NAME]

    ratio = time_ratio(run_theirs, run_ours, rounds=1, warmup=0)  # theirs takes minutes
    for key, value in results["theirs"].items():
        if not abs(results["ours"][key] - value) <= 1e-6:  # not so if one is not a number
            raise RuntimeError(f"{key} is {results['ours'][key]} in ours and {value} in theirs.")
    return ratio
