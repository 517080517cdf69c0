"""Draw the basis images of one picture's views."""

import sys

from kscl.commands.visualize_basis import main

if __name__ == "__main__":
    sys.exit(main())
