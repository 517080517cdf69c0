"""Propose a comparison for your data and your minutes."""

from kscl.commands.start import main

if __name__ == "__main__":
    raise SystemExit(main())
