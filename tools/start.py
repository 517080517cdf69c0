"""Propose a comparison for your data and your minutes."""

import sys

from kscl.commands.start import main

if __name__ == "__main__":
    sys.exit(main())
