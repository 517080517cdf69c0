"""From a pretrained backbone to a detector and its AP, on Detectron2.

Importing the package registers its head and backbones with Detectron2, if installed. The installer,
preflight and scoring work without Detectron2, and a bare --help does not wait for it.
"""

import importlib.util
import sys
import warnings

from detection.install import require_detectron2
from kscl.cli import EXIT_INTERRUPTED

MIN_SCORE = 0.5  # default: boxes below it are neither printed nor drawn

# Detectron2's use of torch.jit and torch.meshgrid.
warnings.filterwarnings("ignore", ".*torch.jit", FutureWarning)
warnings.filterwarnings("ignore", "torch.meshgrid: in an upcoming release", UserWarning)
# Gradients of a transformer's tokens are not contiguous, so DDP copies them.
warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)
only_help = sys.argv[1:] in (["--help"], ["-h"])
if not only_help and importlib.util.find_spec("detectron2") is not None:
    try:
        import detection.backbones  # noqa: F401
    except KeyboardInterrupt:  # this import takes seconds, and no tool can catch it yet
        if hasattr(sys, "ps1"):  # a Python prompt or a notebook
            raise
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)

__all__ = ["MIN_SCORE", "require_detectron2"]
