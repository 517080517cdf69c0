"""Check data sets before a run (see detection/preflight.py)."""

import sys

from detection.preflight_cli import main

if __name__ == "__main__":
    sys.exit(main())
