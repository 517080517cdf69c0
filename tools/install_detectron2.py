"""Install Detectron2 into the Python that runs this (see detection/install.py)."""

import sys

from detection.install import main

if __name__ == "__main__":
    sys.exit(main())
