"""Look for all that would stop an evaluation, without starting it or writing anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fvcore.common.config import CfgNode

from kscl.cli import is_later
from kscl.data.annotated.annotations import Problem
from kscl.data.bad_images import find_unreadable
from kscl.data.formats import DECODED_SAMPLE
from kscl.errors import KsclError
from linear_eval.backbone import load
from linear_eval.data.images import LabeledImages
from linear_eval.data.overlap import refuse_overlap
from linear_eval.evaluate import open_and_check

WEIGHTS_KEY = "BACKBONE.WEIGHTS"


def check_evaluation(
    cfg: CfgNode, later: Sequence[str], allow_overlap: bool = False
) -> list[Problem]:
    """Return the problems of data and weights."""
    return list(_problems(cfg, later, allow_overlap))


def _problems(cfg: CfgNode, later: Sequence[str], allow_overlap: bool) -> Iterator[Problem]:
    if not any(is_later(where, later) for where in _places(cfg)):
        try:
            if not allow_overlap:
                refuse_overlap(cfg)
            data = open_and_check(cfg)
            for images in data.values():
                yield from _unreadable(images, 2 * DECODED_SAMPLE // len(data))
        except KsclError as error:
            yield Problem("data", _keys(cfg), str(error), "")
    if not is_later(WEIGHTS_KEY, later) and not is_later(cfg.BACKBONE.WEIGHTS, later):
        try:
            load(cfg)
        except KsclError as error:
            yield Problem("weights", WEIGHTS_KEY, str(error), "")


def _unreadable(images: LabeledImages, most: int) -> Iterator[Problem]:
    """Decode the images of a set, or a fixed sample of many, and say which."""
    source, numbers = images.source, images.numbers.tolist()
    num_decoded, reasons, notes = find_unreadable(source, numbers, most, images.max_pixels)
    yield from notes
    for number, reason in reasons.items():
        what = (
            f"{len(reasons)} of the {num_decoded:,} images that were decoded cannot be read, "
            f"{source.name(number)} ({reason}) for one"
        )
        fix = "A score counts every image, so none is skipped: fix or remove them"
        yield Problem("unreadable image", source.where, what, fix)
        return


def _keys(cfg: CfgNode) -> str:
    return "SETS" if cfg.PROBE == "linear_suite" else "DATA.TRAIN and DATA.VAL"


def _places(cfg: CfgNode) -> list[str]:
    """Return where the training images are, of every set."""
    if cfg.PROBE == "linear_suite":
        return [given["train"] for given in cfg.SETS.values() if given]
    return [cfg.DATA.TRAIN]
