"""Make the leaderboard from run records."""

import sys

from kscl.commands.leaderboard import main

if __name__ == "__main__":
    sys.exit(main())
