"""Say what is installed here, what is missing and how to fix it."""

import sys

from kscl.commands.doctor import main

if __name__ == "__main__":
    sys.exit(main())
