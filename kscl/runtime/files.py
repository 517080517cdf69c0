"""Write files so that no reader ever sees half of one."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from kscl.errors import KsclError


def write_atomically(path: Path, content: bytes, replace: bool = True) -> None:
    """Write to a temporary file, sync it, and rename it; without `replace`, raise if it exists."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        if replace:
            os.replace(name, path)
        else:
            os.link(name, path)  # fails where the name is taken, also in a race
            os.unlink(name)
        sync_folder(path.parent)
    except FileExistsError as error:
        os.unlink(name)
        raise KsclError(f"{path} exists already and is never overwritten.") from error
    except OSError as error:
        os.unlink(name)
        raise _cannot_write(path, error) from error
    except BaseException:
        os.unlink(name)
        raise


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cannot_write(path: Path, error: OSError) -> KsclError:
    return KsclError(
        f"{path} cannot be written: {error.strerror}. Make room, or choose a folder that you may "
        "write to."
    )
