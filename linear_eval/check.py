"""Look for all that would stop an evaluation, without starting it or writing anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fvcore.common.config import CfgNode

from kscl.cli import is_later
from kscl.data.annotated.annotations import Problem
from kscl.data.bad_images import check_some_image_reads
from kscl.errors import KsclError
from linear_eval.backbone import load
from linear_eval.data.overlap import refuse_overlap
from linear_eval.evaluate import open_and_check

WEIGHTS_KEY = "BACKBONE.WEIGHTS"


def check_evaluation(cfg: CfgNode, later: Sequence[str]) -> list[Problem]:
    """Return the problems of data and weights."""
    return list(_problems(cfg, later))


def _problems(cfg: CfgNode, later: Sequence[str]) -> Iterator[Problem]:
    if not any(is_later(where, later) for where in _places(cfg)):
        try:
            refuse_overlap(cfg)
            for images in open_and_check(cfg).values():
                check_some_image_reads(images.source, cfg.SEED, cfg.DATA.MAX_PIXELS)
        except KsclError as error:
            yield Problem("data", _keys(cfg), str(error), "")
    if not is_later(WEIGHTS_KEY, later) and not is_later(cfg.BACKBONE.WEIGHTS, later):
        try:
            load(cfg)
        except KsclError as error:
            yield Problem("weights", WEIGHTS_KEY, str(error), "")


def _keys(cfg: CfgNode) -> str:
    return "SETS" if cfg.PROBE == "linear_suite" else "DATA.TRAIN and DATA.VAL"


def _places(cfg: CfgNode) -> list[str]:
    """Return where the training images are, of every set."""
    if cfg.PROBE == "linear_suite":
        return [given["train"] for given in cfg.SETS.values() if given]
    return [cfg.DATA.TRAIN]
