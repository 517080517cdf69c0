"""Make the leaderboard from run records (see kscl/leaderboard/)."""

import sys

from kscl.leaderboard.cli import main

if __name__ == "__main__":
    sys.exit(main())
