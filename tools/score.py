"""`kscl score`: score saved detections again."""

from kscl.main import run

if __name__ == "__main__":
    run("score")
