"""Say what is installed here, what is missing and how to fix it."""

from kscl.commands.doctor import main

if __name__ == "__main__":
    raise SystemExit(main())
