"""Pack records for a pull request."""

from kscl.commands.submit import main

if __name__ == "__main__":
    raise SystemExit(main())
