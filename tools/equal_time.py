"""Give all contenders of a suite the same time."""

import sys

from kscl.commands.equal_time import main

if __name__ == "__main__":
    sys.exit(main())
