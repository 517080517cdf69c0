"""Run the whole chain from one file."""

from kscl.commands.run_suite import main

if __name__ == "__main__":
    raise SystemExit(main())
