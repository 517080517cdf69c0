"""`kscl train-net`: fine-tune and score a detector."""

from kscl.main import run

if __name__ == "__main__":
    run("train-net")
