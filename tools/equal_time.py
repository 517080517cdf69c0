"""Give all contenders of a suite the same time."""

from kscl.commands.equal_time import main

if __name__ == "__main__":
    raise SystemExit(main())
