"""`kscl preflight`: check detection sets before a run."""

from kscl.main import run

if __name__ == "__main__":
    run("preflight")
