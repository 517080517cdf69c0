"""Evaluate a backbone by linear probes, nearest neighbors, SVMs, or fine-tuning on few labels."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this file would hide the package

import kscl  # noqa: F401 - first: it names a package that hides one of ours
from linear_eval.commands.linear_eval import main

if __name__ == "__main__":
    raise SystemExit(main())
