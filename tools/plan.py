"""Say on paper what a pretraining run takes, before it starts (see kscl/commands/plan.py)."""

import sys

from kscl.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
