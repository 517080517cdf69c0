"""Check the submissions under results/."""

from kscl.commands.check_submission import main

if __name__ == "__main__":
    raise SystemExit(main())
