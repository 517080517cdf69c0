"""`kscl equal-time`: give all contenders the same time."""

from kscl.main import run

if __name__ == "__main__":
    run("equal-time")
