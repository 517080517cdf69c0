"""Draw the basis images of one picture's views (see kscl/commands/visualize_basis.py)."""

import sys

from kscl.commands.visualize_basis import main

if __name__ == "__main__":
    sys.exit(main())
