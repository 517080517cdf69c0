"""`kscl visualize basis`: draw a picture's basis images."""

from kscl.main import run

if __name__ == "__main__":
    run("visualize basis")
