"""`kscl doctor`: show what is installed, what is missing, the fix."""

from kscl.main import run

if __name__ == "__main__":
    run("doctor")
