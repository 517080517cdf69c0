"""Draw the basis images of one picture's views."""

from kscl.commands.visualize_basis import main

if __name__ == "__main__":
    raise SystemExit(main())
