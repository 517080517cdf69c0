"""Export a pretrained backbone for use elsewhere."""

import sys

from kscl.commands.export import main

if __name__ == "__main__":
    sys.exit(main())
