"""`kscl export`: export a backbone for use elsewhere."""

from kscl.main import run

if __name__ == "__main__":
    run("export")
