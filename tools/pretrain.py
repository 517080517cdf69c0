"""Pretrain a backbone on a folder of images (see kscl/pretrain.py)."""

import sys

from kscl.pretrain import main

if __name__ == "__main__":
    sys.exit(main())
