"""Make a number again from its record."""

import sys

from kscl.commands.reproduce import main

if __name__ == "__main__":
    sys.exit(main())
