"""Find packages of others with the name of one of ours: imported instead, or mixed with it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import warnings
from pathlib import Path

BESIDE_US = ("detection", "linear_eval")  # common names; `kscl` is only ours


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


def in_words(name: str, place: str) -> str:
    """Return what is wrong and what to do."""
    return (
        f"The package '{name}' in {place} has the name of one of this project's and is imported "
        f"instead of it. Uninstall it, take it off PYTHONPATH, or use an environment of its own."
    )


def warn_of_hidden_packages() -> None:
    """Name every package that hides one of ours, before its import fails in another way."""
    for name, place in hidden_packages().items():
        warnings.warn(in_words(name, place), RuntimeWarning, stacklevel=3)
