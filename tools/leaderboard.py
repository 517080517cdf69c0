"""`kscl board`: make the leaderboard from run records."""

from kscl.main import run

if __name__ == "__main__":
    run("board")
