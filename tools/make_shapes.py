"""Draw the data set of textured shapes that the demo runs on."""

from kscl.commands.make_shapes import main

if __name__ == "__main__":
    raise SystemExit(main())
