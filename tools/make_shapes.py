#!/usr/bin/env python
"""Draw the data set of textured shapes that the demo runs on."""

from kscl.shapes.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
