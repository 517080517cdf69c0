"""Score saved detections again."""

import sys

from detection.commands.score import main

if __name__ == "__main__":
    sys.exit(main())
