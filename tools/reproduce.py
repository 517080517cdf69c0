"""Make a number again from its record."""

from kscl.commands.reproduce import main

if __name__ == "__main__":
    raise SystemExit(main())
