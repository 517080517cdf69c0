"""Draw the basis images of one picture's views (see kscl/basis_images.py)."""

import sys

from kscl.basis_images import main

if __name__ == "__main__":
    sys.exit(main())
