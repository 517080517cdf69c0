"""Check data sets before a run."""

import kscl  # noqa: F401 - first: it names a package that hides one of ours
from detection.commands.preflight import main

if __name__ == "__main__":
    raise SystemExit(main())
