"""Score saved detections again."""

import sys

import kscl  # noqa: F401 - first: it names a package that hides one of ours
from detection.commands.score import main

if __name__ == "__main__":
    sys.exit(main())
