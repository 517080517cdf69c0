"""`kscl predict`: find objects in photos with a detector."""

from kscl.main import run

if __name__ == "__main__":
    run("predict")
