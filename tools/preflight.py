"""Check data sets before a run."""

import sys

from detection.commands.preflight import main

if __name__ == "__main__":
    sys.exit(main())
