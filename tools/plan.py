"""`kscl plan`: estimate memory and time of a pretraining run."""

from kscl.main import run

if __name__ == "__main__":
    run("plan")
