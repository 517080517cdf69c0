"""Draw what a detector found beside what is there."""

import sys

from detection.commands.visualize_detections import main

if __name__ == "__main__":
    sys.exit(main())
