"""Write files and folders so that no reader ever sees half of one, and lock folders."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from kscl.errors import KsclError


def read_arrays(path: str | Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file; raise ValueError for one that is damaged in any way."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except OSError:
        raise
    except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds for damaged bytes
        raise ValueError(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def whole_file(path: Path, replace: bool = True) -> Iterator[IO[bytes]]:
    """Yield a file to fill, which is synced and gets its name at the end, or is removed."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        if replace:
            os.replace(name, path)
        else:
            os.link(name, path)  # fails where the name is taken, also in a race
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):  # it has its new name already
            os.unlink(name)


def write_atomically(path: Path, content: bytes, replace: bool = True) -> None:
    """Write a file whole or not at all; without `replace`, raise if it exists."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, replace) as file:
            file.write(content)
    except OSError as error:
        if isinstance(error, FileExistsError) and os.path.lexists(path):
            raise KsclError(f"{path} exists already and is never overwritten.") from error
        raise _cannot_write(path, error) from error


@contextlib.contextmanager
def whole_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a folder to fill, which gets its name at the end; after a failure nothing is left.

    With `replace`, what has the name is removed then; otherwise only an empty folder may have it.
    """
    target = folder.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise _cannot_write(folder, error) from error
    try:
        yield place
        place.chmod(0o755)
        if replace:
            _replace(place, target)
        else:
            if target.is_dir():
                target.rmdir()  # fails unless it is empty
            place.rename(target)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder survive a power failure, where the file system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
            raise
    finally:
        os.close(handle)


def _replace(place: Path, target: Path) -> None:
    """Move what was there away first, as a whole, so that no mixture is ever seen."""
    if not target.exists():
        place.rename(target)
        return
    old = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.old."))
    target.replace(old)
    try:
        place.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old)


def _cannot_write(path: Path, error: OSError) -> KsclError:
    return KsclError(
        f"{path} cannot be written: {error.strerror or error}. Make room, or choose a folder that "
        "you may write to."
    )


LOCK_FILE = ".lock"
LOCK_PATIENCE = 10.0  # seconds; ranks of a killed launcher end within a moment


@contextlib.contextmanager
def only_run_in(folder: Path, setting: str = "OUTPUT_DIR") -> Iterator[None]:
    """Hold the folder for this process; the system releases it however the process ends.

    `setting` is what names the folder to the user.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("w")
    except OSError as error:
        raise KsclError(
            f"{setting} {folder} cannot be written to: {error.strerror}. Choose another."
        ) from error
    with lock:
        deadline = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                # Not flock: forked workers would inherit it and hold it after this process is gone.
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise KsclError(
                        f"Another run is writing to {folder} right now. Stop it, or choose another "
                        f"{setting}."
                    ) from None
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        yield


def is_locked(folder: Path) -> bool:
    """Return whether another process holds the folder; nothing is written.

    Not for a folder that this process holds: closing the file would release it.
    """
    try:
        with (folder / LOCK_FILE).open() as lock:
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        return False
    return False


def existing_parent(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(p for p in (folder, *folder.absolute().parents) if p.exists())
