"""Install Detectron2 into the Python that runs this."""

import kscl  # noqa: F401 - first: it names a package that hides one of ours
from detection.install import main

if __name__ == "__main__":
    raise SystemExit(main())
