"""Say what is installed here, what is missing and how to mend it (see kscl/commands/doctor.py)."""

import sys

from kscl.commands.doctor import main

if __name__ == "__main__":
    sys.exit(main())
