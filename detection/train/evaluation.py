"""One inference pass over the test set: saved, and scored by every scorer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.evaluation import inference_on_dataset
from detectron2.modeling import build_model
from detectron2.utils import comm
from torch import nn
from torch.utils.data import DataLoader

from detection.data.sets import RunSets
from detection.scoring import ScorerResult, scorers_for
from detection.scoring.evaluator import SavedPassEvaluator
from detection.train.checkpoint import load_detector
from detection.train.loader import build_test_loader
from detection.train.trainer import Stopped
from kscl.runtime.files import write_atomically
from kscl.runtime.processes.signals import StopRequest

SCORES_FILE = "scores.json"


class _StoppableLoader:
    """A loader that ends the pass on request; what led to the pass is on disk already."""

    def __init__(self, loader: DataLoader[Any], stop: StopRequest) -> None:
        self.loader, self.stop = loader, stop

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if self.stop:
                raise Stopped
            yield batch


def evaluate(
    cfg: CfgNode, model: nn.Module, sets: RunSets, stop: StopRequest
) -> dict[str, ScorerResult]:
    """Pass over the test set, save and score the pass; return nothing on ranks other than 0."""
    (name,) = cfg.DATASETS.TEST
    masks = cfg.MODEL.MASK_ON
    scorers = scorers_for(masks, cfg.KSCL.SCORER)
    evaluator = SavedPassEvaluator(name, cfg.OUTPUT_DIR, scorers, sets.ground_truth, masks)
    loader = _StoppableLoader(build_test_loader(cfg, sets.test_dicts()), stop)
    inference_on_dataset(model, loader, evaluator)
    if comm.is_main_process():
        text = json.dumps(evaluator.scores, indent=1)
        write_atomically(Path(cfg.OUTPUT_DIR) / SCORES_FILE, text.encode())
    return evaluator.scores


def evaluate_detector(cfg: CfgNode, sets: RunSets, stop: StopRequest) -> None:
    """Evaluate MODEL.WEIGHTS, a trained detector."""
    model = build_model(cfg)
    load_detector(model, cfg.MODEL.WEIGHTS)
    evaluate(cfg, model, sets, stop)
