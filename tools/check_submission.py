"""`kscl check-submission`: check submissions."""

from kscl.main import run

if __name__ == "__main__":
    run("check-submission")
