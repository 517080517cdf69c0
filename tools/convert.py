"""Convert a pretrained backbone for Detectron2, with proof (see detection/convert.py)."""

import sys

from detection.convert_cli import main

if __name__ == "__main__":
    sys.exit(main())
