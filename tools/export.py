"""Export a pretrained backbone for use elsewhere."""

from kscl.commands.export import main

if __name__ == "__main__":
    raise SystemExit(main())
