"""Draw what a detector found beside what is there."""

import kscl  # noqa: F401 - first: it names a package that hides one of ours
from detection.commands.visualize_detections import main

if __name__ == "__main__":
    raise SystemExit(main())
