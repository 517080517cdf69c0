"""Fine-tune and score a detector."""

import kscl  # noqa: F401 - first: it names a package that hides one of ours
from detection.commands.train_net import main

if __name__ == "__main__":
    raise SystemExit(main())
