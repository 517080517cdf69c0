"""Score saved detections again (see detection/scoring/)."""

import sys

from detection.scoring.cli import main

if __name__ == "__main__":
    sys.exit(main())
