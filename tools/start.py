"""`kscl start`: write a suite for your data and your minutes."""

from kscl.main import run

if __name__ == "__main__":
    run("start")
