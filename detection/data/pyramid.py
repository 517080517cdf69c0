"""Images that are too small for a detector's pyramid of features, reported before training."""

from __future__ import annotations

from collections.abc import Iterator

from detectron2.config import CfgNode

from detection.data.report import Report
from kscl.data.annotated.annotations import Problem

COARSEST = {"GeneralizedRCNN": 64, "RetinaNet": 128}  # strides of p6 and p7
NO_PYRAMID = "build_resnet_backbone"


def too_small_images(cfg: CfgNode, report: Report) -> Iterator[Problem]:
    """Yield a problem for every size of input at which the coarsest level has no whole cell."""
    stride = COARSEST.get(cfg.MODEL.META_ARCHITECTURE, 0)
    if cfg.MODEL.BACKBONE.NAME == NO_PYRAMID:
        return
    sizes = {
        "train": (min(cfg.INPUT.MIN_SIZE_TRAIN), cfg.INPUT.MAX_SIZE_TRAIN),
        "test": (cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST),
    }
    for role, (shorter, longer) in sizes.items():
        key = f"INPUT.MIN_SIZE_{role.upper()}"
        if shorter == 0:  # the images are used in their own size
            for _, annotated in report.annotated[role]:
                for image in annotated.images:
                    if min(image.width, image.height) < stride:
                        what = f"is {image.width} x {image.height} pixels, and {key} is 0"
                        yield _problem(str(image.path), what, stride)
        elif min(shorter, longer) < stride:
            what = f"is {shorter} and INPUT.MAX_SIZE_{role.upper()} is {longer}"
            yield _problem(key, what, stride)


def _problem(where: str, what: str, stride: int) -> Problem:
    what += f", but the coarsest level of the feature pyramid has a stride of {stride} pixels"
    return Problem("image too small", where, what, f"Use images of at least {stride} pixels")
