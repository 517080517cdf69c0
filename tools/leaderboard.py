"""Make the leaderboard from run records."""

from kscl.commands.leaderboard import main

if __name__ == "__main__":
    raise SystemExit(main())
