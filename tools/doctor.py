"""Say what is installed here, what is missing and how to mend it (see kscl/doctor.py)."""

import sys

from kscl.doctor import main

if __name__ == "__main__":
    sys.exit(main())
