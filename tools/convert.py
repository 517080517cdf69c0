"""`kscl convert`: convert a backbone for Detectron2."""

from kscl.main import run

if __name__ == "__main__":
    run("convert")
