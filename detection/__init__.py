"""From a pretrained backbone to a Faster R-CNN and its AP, on real Detectron2."""

from detection.install import require_detectron2

__all__ = ["require_detectron2"]
