"""Install Detectron2, which is not on PyPI under its own name and ships no wheels for new Pythons.

By default the pinned wheel below is fetched, checked by its hash and repacked as a plain Python
package: what we need of Detectron2 (C4, FPN and RetinaNet detectors, data, evaluators) runs without
its compiled part. `--from-source` builds the official repository instead, with a compiler.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from detection.install import install
from kscl.errors import KsclError

EXAMPLES = """examples:
  python tools/install_detectron2.py                 the pinned pure-Python Detectron2
  python tools/install_detectron2.py --from-source   build the official repository (git, compiler)
  python tools/install_detectron2.py --wheel FILE    use a wheel fetched elsewhere (same hash)
"""


def main(argv: list[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    parser = argparse.ArgumentParser(
        prog=os.path.basename(sys.argv[0]),
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--from-source", action="store_true", help="build the official repository")
    parser.add_argument("--wheel", type=Path, help="use this file instead of downloading it")
    parser.add_argument("--force", action="store_true", help="replace one that imports already")
    arguments = parser.parse_args(argv)
    try:
        print(install(arguments.from_source, arguments.wheel, arguments.force))
    except KsclError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
