"""Run the whole chain from one file."""

import sys

from kscl.commands.run_suite import main

if __name__ == "__main__":
    sys.exit(main())
