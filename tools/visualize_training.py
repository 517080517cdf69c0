"""`kscl visualize training`: draw curves of runs."""

from kscl.main import run

if __name__ == "__main__":
    run("visualize training")
