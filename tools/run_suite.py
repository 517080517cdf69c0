"""`kscl run`: run or resume a suite, here or on SLURM."""

from kscl.main import run

if __name__ == "__main__":
    run("run")
