"""Run the whole chain from one file (see kscl/suite/)."""

import sys

from kscl.suite.cli import main

if __name__ == "__main__":
    sys.exit(main())
