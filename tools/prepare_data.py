"""`kscl prepare`: bring data into the layout of the configs."""

from kscl.main import run

if __name__ == "__main__":
    run("prepare")
