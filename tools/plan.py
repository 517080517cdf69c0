"""Say on paper what a pretraining run takes, before it starts (see kscl/plan.py)."""

import sys

from kscl.plan import main

if __name__ == "__main__":
    sys.exit(main())
