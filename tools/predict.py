"""Find objects in any photos with a detector you trained."""

import kscl  # noqa: F401 - first: it names a package that hides one of ours
from detection.commands.predict import main

if __name__ == "__main__":
    raise SystemExit(main())
