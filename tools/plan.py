"""Estimate what a pretraining run takes, before it starts."""

import sys

from kscl.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
