"""Convert a pretrained backbone for Detectron2, with proof."""

import sys

from detection.commands.convert import main

if __name__ == "__main__":
    sys.exit(main())
