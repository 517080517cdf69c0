"""Draw the curves of training runs side by side."""

import sys

from kscl.commands.visualize_training import main

if __name__ == "__main__":
    sys.exit(main())
