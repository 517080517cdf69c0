"""Measure every figure that has a bound (the figures are in tests/benchmarks/)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is not installed

from tests.benchmarks.run import main

if __name__ == "__main__":
    raise SystemExit(main())
