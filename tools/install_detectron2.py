"""`kscl install-detectron2`: install Detectron2 into this Python."""

from kscl.main import run

if __name__ == "__main__":
    run("install-detectron2")
