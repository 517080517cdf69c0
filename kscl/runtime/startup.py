"""What `import kscl` does first: name packages that hide ours, silence messages of libraries.

Ranks and loader workers import kscl, too, or are forked from a process that has.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import sys
import warnings
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
# Common names (`kscl` is only ours), and what their `__init__.py` begins with if they are ours.
FIRST_WORDS = {
    "detection": b'"""From a pretrained backbone to a Faster R-CNN',
    "linear_eval": b'"""How good a backbone is: probes of its frozen features',
}
# The number of workers is a setting, and the run says how fast its images are read.
WORKER_COUNT = r"This DataLoader will create \d+ worker processes"
# Detectron2 asks whether it is traced; newer releases of torch log a warning about that question.
TRACING_LOGGER = "torch.fx._symbolic_trace"
TRACING = "is_fx_tracing will return true"


def put_packages_before_tools() -> None:
    """Keep linear_eval.py in tools/ from hiding the package of that name."""
    if sys.path and Path(sys.path[0], "linear_eval.py").is_file():
        sys.path[0] = str(HOME)


def hidden_packages() -> dict[str, str]:
    """Return for each package of ours that another one hides the place of the other."""
    found = {}
    for name in FIRST_WORDS:
        if not (HOME / name / "__init__.py").is_file():
            continue
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        places = list(spec.submodule_search_locations or [spec.origin or ""]) if spec else []
        if places and not any(Path(place).resolve().is_relative_to(HOME) for place in places):
            found[name] = places[0]
    return found


def mixed_packages() -> dict[str, str]:
    """Return for each package of ours the other distribution that has files in its folder.

    Reads what every distribution has installed, so it is too slow for each import.
    """
    owners = importlib.metadata.packages_distributions()
    found = {}
    for name in FIRST_WORDS:
        for owner in sorted({*owners.get(name, ())} - {"kscl"}):
            place = importlib.metadata.distribution(owner).locate_file(name)
            if Path(str(place)).resolve() == HOME / name:
                found[name] = owner
    return found


def overwritten_packages() -> dict[str, str]:
    """Return for each package of ours the `__init__.py` that another one wrote over it.

    Ours begin with FIRST_WORDS, and a line of each is read: cheap enough for every import.
    """
    found = {}
    for name, words in FIRST_WORDS.items():
        file = HOME / name / "__init__.py"
        if file.is_file():
            with file.open("rb") as content:
                if not content.readline().startswith(words):
                    found[name] = str(file)
    return found


def warn_of_hidden_packages() -> None:
    """Name what hides or overwrites a package of ours, before its import fails in another way."""
    texts = [
        f"The package '{name}' in {place} has the name of one of this project's and is imported "
        "instead of it. Uninstall it, take it off PYTHONPATH, or use an environment of its own."
        for name, place in hidden_packages().items()
    ]
    texts += [
        f"{file} is not this project's: another package called '{name}' was installed over it. "
        "Uninstall the other one and install this project again, or use an environment of its own."
        for name, file in overwritten_packages().items()
    ]
    for text in texts:
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def silence_library_messages() -> None:
    """Hide two messages that are not the user's concern; everything else is still shown."""
    warnings.filterwarnings("ignore", WORKER_COUNT, UserWarning)
    logging.getLogger(TRACING_LOGGER).addFilter(
        lambda record: not record.getMessage().startswith(TRACING)
    )
