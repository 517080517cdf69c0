"""Make the leaderboard from run records (see kscl/commands/leaderboard.py)."""

import sys

from kscl.commands.leaderboard import main

if __name__ == "__main__":
    sys.exit(main())
