"""`kscl visualize detections`: draw what a detector found, and its AP."""

from kscl.main import run

if __name__ == "__main__":
    run("visualize detections")
