"""Evaluate a frozen backbone by a linear probe or nearest neighbours (see linear_eval/cli.py)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # or this file hides its package

from linear_eval.cli import main

if __name__ == "__main__":
    sys.exit(main())
