"""Measure where the time of a pretraining step goes."""

from kscl.commands.profile_step import main

if __name__ == "__main__":
    raise SystemExit(main())
