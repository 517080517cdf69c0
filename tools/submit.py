"""Pack records for a pull request."""

import sys

from kscl.commands.submit import main

if __name__ == "__main__":
    sys.exit(main())
