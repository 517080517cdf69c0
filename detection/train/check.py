"""Look for all that would stop a fine-tuning, without starting it or writing anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from detectron2.config import CfgNode

from detection.config import WEIGHTS_KEY
from detection.convert.verify import verify_start
from detection.data.sets import check_sets
from detection.train.lr_search import GRID_KEY, check_grid, images_to_divide
from kscl.cli import is_later
from kscl.data.annotated.annotations import Problem
from kscl.errors import KsclError


def check_trials(cfg: CfgNode, later: Sequence[str]) -> list[Problem]:
    """Return the problems and notes about the data, and what is wrong with the weights."""
    return list(_problems(cfg, later))


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
