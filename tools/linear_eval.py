"""`kscl probe`: evaluate a backbone: linear probes, nearest neighbors, SVMs, few labels."""

from kscl.main import run

if __name__ == "__main__":
    run("probe")
