"""Get VOC into Detectron2's layout, or check ImageNet's (see detection/prepare_data.py)."""

import sys

from detection.prepare_data import main

if __name__ == "__main__":
    sys.exit(main())
