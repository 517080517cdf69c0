"""Find config files: by path, or among those that ship with the package."""

from __future__ import annotations

import difflib
from pathlib import Path

import kscl
from kscl.errors import ConfigError


def find_config(name: str | Path) -> Path:
    """Return the path as it is, or else that of the shipped config of this name."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    parts = path.parts[1:] if path.parts[:1] == ("configs",) else path.parts
    shipped = shipped_configs().joinpath(*parts)
    if shipped.is_file():
        return shipped
    names = [p.relative_to(shipped_configs()).as_posix() for p in shipped_configs().rglob("*.yaml")]
    nearest = difflib.get_close_matches("/".join(parts), names, n=3, cutoff=0.4)
    raise ConfigError(
        f"{name}: no such config file, here or among those shipped."
        + (f" The nearest shipped ones are {', '.join(nearest)}." if nearest else "")
    )


def shipped_configs() -> Path:
    """Return the folder of configs: beside the packages in a checkout, in `kscl` if installed."""
    package = Path(kscl.__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"
