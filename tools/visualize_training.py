"""Draw the curves of training runs side by side (see kscl/training_figure.py)."""

import sys

from kscl.training_figure import main

if __name__ == "__main__":
    sys.exit(main())
