"""`kscl reproduce`: make a number again from its record."""

from kscl.main import run

if __name__ == "__main__":
    run("reproduce")
