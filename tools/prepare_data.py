"""Bring VOC into Detectron2's layout, or check ImageNet's."""

from kscl.commands.prepare_data import main

if __name__ == "__main__":
    raise SystemExit(main())
