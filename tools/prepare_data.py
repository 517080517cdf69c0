"""Get VOC into Detectron2's layout, or check ImageNet's (see kscl/commands/prepare_data.py)."""

import sys

from kscl.commands.prepare_data import main

if __name__ == "__main__":
    sys.exit(main())
