"""The C4 head of the MoCo protocol: res5 with one more norm at its end (MoCo, section 4.2).

Backbones of different pretraining give the new predictors features of different magnitude; the norm
calibrates them, so that one learning rate works for all contenders.
"""

from __future__ import annotations

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec, get_norm
from detectron2.modeling.roi_heads import ROI_HEADS_REGISTRY, Res5ROIHeads

from detection.errors import DetectionError

PLAIN_HEAD, EXTRA_NORM_HEAD = "Res5ROIHeads", "Res5ROIHeadsExtraNorm"
EXTRA_NORM = "norm"  # its name inside res5: part of what checkpoints of this protocol look like


@ROI_HEADS_REGISTRY.register()
class Res5ROIHeadsExtraNorm(Res5ROIHeads):
    """Res5ROIHeads whose res5 ends in a norm of the backbone's kind."""

    def __init__(self, cfg: CfgNode, input_shape: dict[str, ShapeSpec]) -> None:
        super().__init__(cfg, input_shape)
        kind = cfg.MODEL.RESNETS.NORM
        norm = get_norm(kind, self.res5[-1].out_channels)
        if norm is None:
            raise DetectionError(
                f"MODEL.RESNETS.NORM is '{kind}', and the head Res5ROIHeadsExtraNorm appends a "
                "norm. Name one (naiveSyncBN), or set MODEL.ROI_HEADS.NAME Res5ROIHeads."
            )
        self.res5.add_module(EXTRA_NORM, norm)
