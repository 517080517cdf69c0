"""`kscl profile`: measure where the time of a step goes."""

from kscl.main import run

if __name__ == "__main__":
    run("profile")
