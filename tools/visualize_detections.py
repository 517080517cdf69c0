"""Draw what a detector found beside what is there (see detection/pictures.py)."""

import sys

from detection.pictures import main

if __name__ == "__main__":
    sys.exit(main())
