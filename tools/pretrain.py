"""`kscl pretrain`: pretrain a backbone."""

from kscl.main import run

if __name__ == "__main__":
    run("pretrain")
