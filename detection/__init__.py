"""From a pretrained backbone to a Faster R-CNN and its AP, on real Detectron2.

Importing the package registers its head, Res5ROIHeadsExtraNorm, with Detectron2 where that is
installed; scoring, preflight and reading data need no Detectron2.
"""

import contextlib
import warnings

from detection.install import require_detectron2

# Detectron2's use of torch.jit is not the user's concern.
warnings.filterwarnings("ignore", ".*torch.jit", FutureWarning)
with contextlib.suppress(ImportError):
    from detection.train import roi_heads as heads  # noqa: F401

__all__ = ["require_detectron2"]
