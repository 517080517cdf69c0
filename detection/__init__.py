"""From a pretrained backbone to a Faster R-CNN and its AP, on real Detectron2.

Importing the package registers its head, Res5ROIHeadsExtraNorm, and its backbones of timm networks
with Detectron2 if that is installed; the installer, preflight and scoring work without Detectron2.
Only a bare --help does not wait for it.
"""

import importlib.util
import sys
import warnings

from detection.install import require_detectron2
from kscl.cli import EXIT_INTERRUPTED

MIN_SCORE = 0.5  # default: boxes below it are neither printed nor drawn

# Detectron2's use of torch.jit and torch.meshgrid is not the user's concern.
warnings.filterwarnings("ignore", ".*torch.jit", FutureWarning)
warnings.filterwarnings("ignore", "torch.meshgrid: in an upcoming release", UserWarning)
# Nor is that ranks copy the gradients of a transformer's tokens, which lie apart in memory.
warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)
only_help = sys.argv[1:] in (["--help"], ["-h"])
if not only_help and importlib.util.find_spec("detectron2") is not None:
    # An installed Detectron2 that does not import is an error here, not a missing head later.
    try:
        import detection.backbones  # noqa: F401
    except KeyboardInterrupt:  # within the seconds before a tool can catch it
        if hasattr(sys, "ps1"):  # a Python prompt or a notebook, which goes on
            raise
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)

__all__ = ["MIN_SCORE", "require_detectron2"]
