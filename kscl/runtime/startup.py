"""What `import kscl` does first: name packages that hide ours, silence messages of libraries.

Ranks and loader workers import kscl, too, or are forked from a process that has.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
COMMON_NAMES = ("detection", "linear_eval")  # of our packages; others may have them too
OURS = b"backbone"  # a word in the first line of their `__init__.py`
# The number of workers is a setting, and the run logs how fast images are read.
WORKER_COUNT = r"This DataLoader will create \d+ worker processes"
# Detectron2 asks whether it is traced; newer releases of torch log a warning about that question.
TRACING_LOGGER = "torch.fx._symbolic_trace"
TRACING = "is_fx_tracing will return true"
UNINSTALL = (
    "Uninstall the other package (or take it off PYTHONPATH) and install kscl again, or use a "
    "separate environment."
)


def put_packages_before_tools() -> None:
    """Keep linear_eval.py in tools/ from hiding the package of that name."""
    if sys.path and Path(sys.path[0], "linear_eval.py").is_file():
        sys.path[0] = str(HOME)


def hidden_packages() -> Iterator[tuple[str, str]]:
    """Yield (name, how) of each package of ours that another one hides or has overwritten."""
    for name in COMMON_NAMES:
        file = HOME / name / "__init__.py"
        if not file.is_file():
            continue
        with file.open("rb") as content:
            if OURS not in content.readline():
                yield name, f"another package has overwritten {file}"
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            places = list(spec.submodule_search_locations or [spec.origin or ""]) if spec else []
            if places and not any(Path(place).resolve().is_relative_to(HOME) for place in places):
                yield name, f"another package in {places[0]} hides it"


def mixed_packages() -> Iterator[tuple[str, str]]:
    """Yield (name, how) of each package of ours whose folder has files of another distribution.

    Too slow for each import: it reads the file lists of all distributions.
    """
    owners = importlib.metadata.packages_distributions()
    for name in COMMON_NAMES:
        for owner in sorted({*owners.get(name, ())} - {"kscl"}):
            place = importlib.metadata.distribution(owner).locate_file(name)
            if Path(str(place)).resolve() == HOME / name:
                yield name, f"its folder also has files of the package {owner} in it"


def warn_of_hidden_packages() -> None:
    """Name what hides or overwrites a package of ours, before its import fails in another way."""
    for name, how in hidden_packages():
        text = f"The package '{name}' is not this project's: {how}. {UNINSTALL}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def silence_library_messages() -> None:
    """Hide two messages that are not the user's concern; everything else is still shown."""
    warnings.filterwarnings("ignore", WORKER_COUNT, UserWarning)
    logging.getLogger(TRACING_LOGGER).addFilter(
        lambda record: not record.getMessage().startswith(TRACING)
    )
