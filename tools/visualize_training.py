"""Draw the curves of training runs side by side."""

from kscl.commands.visualize_training import main

if __name__ == "__main__":
    raise SystemExit(main())
