"""`python -m kscl VERB …`: the `kscl` command."""

from kscl.main import main

if __name__ == "__main__":
    raise SystemExit(main(None))
