"""Convert a pretrained backbone for Detectron2, with proof."""

import kscl  # noqa: F401 - first: it names a package that hides one of ours
from detection.commands.convert import main

if __name__ == "__main__":
    raise SystemExit(main())
