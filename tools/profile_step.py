"""Measure where the time of a pretraining step goes."""

import sys

from kscl.commands.profile_step import main

if __name__ == "__main__":
    sys.exit(main())
