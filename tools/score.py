"""Score saved detections again."""

import kscl  # noqa: F401 - first: it names a package that hides one of ours
from detection.commands.score import main

if __name__ == "__main__":
    raise SystemExit(main())
