"""Check the submissions under results/."""

import sys

from kscl.commands.check_submission import main

if __name__ == "__main__":
    sys.exit(main())
