"""`kscl submit`: pack records for a pull request."""

from kscl.main import run

if __name__ == "__main__":
    run("submit")
