"""Fine-tune and score a detector (see detection/commands/train_net.py)."""

import sys

from detection.commands.train_net import main

if __name__ == "__main__":
    sys.exit(main())
