"""Fine-tune and score a detector (see detection/train_cli.py)."""

import sys

from detection.train_cli import main

if __name__ == "__main__":
    sys.exit(main())
