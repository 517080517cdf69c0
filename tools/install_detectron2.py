"""Install Detectron2 into the Python that runs this."""

import sys

from detection.commands.install_detectron2 import main

if __name__ == "__main__":
    sys.exit(main())
