"""Find objects in any photos with a detector you trained."""

import sys

from detection.commands.predict import main

if __name__ == "__main__":
    sys.exit(main())
