"""Look for all that would stop a fine-tuning, without starting it or writing anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import nn

from detection.config import WEIGHTS_KEY
from detection.convert.verify import verify_start
from detection.data.sets import check_sets
from detection.errors import DetectionError
from detection.train.checkpoint import check_room_for
from detection.train.lr_search import GRID_KEY, check_grid, images_to_divide
from kscl.cli import is_later
from kscl.data.annotated.annotations import Problem
from kscl.errors import KsclError


def check_trials(cfg: CfgNode, later: Sequence[str]) -> list[Problem]:
    """Return the problems and notes about data, weights, detector and disk."""
    return list(_problems(cfg, later))


def build_on_paper(cfg: CfgNode) -> nn.Module:
    """Return the detector without numbers; a config of which none can be built is an error."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "meta"
    try:
        with torch.device("meta"):  # no memory, no random numbers: only its structure is needed
            return build_model(cfg)
    except KsclError:
        raise
    except Exception as error:  # whatever Detectron2 does with keys that do not fit together
        raise DetectionError(
            f"No detector can be built of this config ({type(error).__name__}: {error}). Correct "
            "the keys of MODEL and KSCL.TIMM, or start from a protocol in configs/detection/."
        ) from error


def _problems(cfg: CfgNode, later: Sequence[str]) -> Iterator[Problem]:
    if cfg.KSCL.LR_GRID:
        try:
            check_grid(list(cfg.KSCL.LR_GRID), GRID_KEY)
        except KsclError as error:
            yield Problem("config", GRID_KEY, str(error), "")
    if not any(is_later(name, later) for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)):
        try:
            report = check_sets(cfg)
            yield from report.problems
            if cfg.KSCL.LR_GRID and report.annotated["train"]:
                images_to_divide(report.annotated["train"])
        except KsclError as error:
            yield Problem("data", "DATASETS", str(error), "")
    if not is_later(WEIGHTS_KEY, later):
        try:
            verify_start(cfg)
        except KsclError as error:
            yield Problem("weights", WEIGHTS_KEY, str(error), "")
    try:
        model = build_on_paper(cfg)
    except KsclError as error:
        yield Problem("detector", "MODEL", str(error), "")
        return
    try:
        check_room_for(Path(cfg.OUTPUT_DIR), model)
    except KsclError as error:
        yield Problem("disk", "OUTPUT_DIR", str(error), "")
