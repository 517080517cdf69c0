"""Pretrain a backbone on a folder of images (see kscl/commands/pretrain.py)."""

import sys

from kscl.commands.pretrain import main

if __name__ == "__main__":
    sys.exit(main())
