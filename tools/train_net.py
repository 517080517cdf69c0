"""Fine-tune and score a detector."""

import sys

from detection.commands.train_net import main

if __name__ == "__main__":
    sys.exit(main())
