"""Run the whole chain from one file (see kscl/commands/run_suite.py)."""

import sys

from kscl.commands.run_suite import main

if __name__ == "__main__":
    sys.exit(main())
