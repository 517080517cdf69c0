"""What `import kscl` does first: name packages that hide ours, silence messages of libraries."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import sys
import warnings
from pathlib import Path

# Common names (`kscl` is only ours), and what their `__init__.py` begins with if they are ours.
FIRST_WORDS = {
    "detection": b'"""From a pretrained backbone to a Faster R-CNN',
    "linear_eval": b'"""How good a backbone is: probes of its frozen features',
}
BESIDE_US = tuple(FIRST_WORDS)


def hidden_packages() -> dict[str, str]:
    """Return for each package of ours that another one hides the place of the other."""
    home = Path(__file__).resolve().parents[2]
    found = {}
    for name in BESIDE_US:
        if not (home / name / "__init__.py").is_file():
            continue
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        places = list(spec.submodule_search_locations or [spec.origin or ""]) if spec else []
        # Beside the running script is a tool of the same name, which puts the package first itself.
        ours = (home, Path(sys.argv[0]).resolve().parent)
        found_at = [Path(place).resolve() for place in places]
        if places and not any(it.is_relative_to(own) for it in found_at for own in ours):
            found[name] = places[0]
    return found


def mixed_packages() -> dict[str, str]:
    """Return for each package of ours the other distribution that has files in its folder.

    Reads what every distribution has installed, so it is too slow for each import.
    """
    home = Path(__file__).resolve().parents[2]
    owners = importlib.metadata.packages_distributions()
    found = {}
    for name in BESIDE_US:
        for owner in sorted({*owners.get(name, ())} - {"kscl"}):
            place = importlib.metadata.distribution(owner).locate_file(name)
            if Path(str(place)).resolve() == home / name:
                found[name] = owner
    return found


def overwritten_packages() -> dict[str, str]:
    """Return for each package of ours the `__init__.py` that another one wrote over it.

    Ours begin with FIRST_WORDS, and a line of each is read: cheap enough for every import.
    """
    home = Path(__file__).resolve().parents[2]
    found = {}
    for name, words in FIRST_WORDS.items():
        file = home / name / "__init__.py"
        try:
            with file.open("rb") as content:
                is_ours = content.readline().startswith(words)
        except OSError:  # not installed
            continue
        if not is_ours:
            found[name] = str(file)
    return found


def overwritten_in_words(name: str, file: str) -> str:
    """Return what is wrong and what to do."""
    return (
        f"{file} is not this project's: another package called '{name}' was installed over it. "
        "Uninstall the other one and install this project again, or use an environment of its own."
    )


def in_words(name: str, place: str) -> str:
    """Return what is wrong and what to do."""
    return (
        f"The package '{name}' in {place} has the name of one of this project's and is imported "
        f"instead of it. Uninstall it, take it off PYTHONPATH, or use an environment of its own."
    )


def warn_of_hidden_packages() -> None:
    """Name what hides or overwrites a package of ours, before its import fails in another way."""
    for name, place in hidden_packages().items():
        warnings.warn(in_words(name, place), RuntimeWarning, stacklevel=3)
    for name, file in overwritten_packages().items():
        warnings.warn(overwritten_in_words(name, file), RuntimeWarning, stacklevel=3)


# The number of workers is a setting, and the run says how fast its images are read.
WORKER_COUNT = r"This DataLoader will create \d+ worker processes"
# Detectron2 asks whether it is traced; newer releases of torch log a warning about that question.
TRACING_LOGGER = "torch.fx._symbolic_trace"
TRACING = "is_fx_tracing will return true"


def silence_library_messages() -> None:
    """Add the filters; everything else is still shown."""
    warnings.filterwarnings("ignore", WORKER_COUNT, UserWarning)
    logging.getLogger(TRACING_LOGGER).addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(TRACING)
