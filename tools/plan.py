"""Estimate what a pretraining run takes, before it starts."""

from kscl.commands.plan import main

if __name__ == "__main__":
    raise SystemExit(main())
