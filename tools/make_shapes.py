"""`kscl shapes`: draw the data set of textured shapes."""

from kscl.main import run

if __name__ == "__main__":
    run("shapes")
