"""Pretrain a backbone on a folder of images."""

import sys

from kscl.commands.pretrain import main

if __name__ == "__main__":
    sys.exit(main())
