"""Pretrain a backbone on a folder of images."""

from kscl.commands.pretrain import main

if __name__ == "__main__":
    raise SystemExit(main())
