"""The project's PathManager: local paths as they are, and remote files fetched whole into a cache.

http(s) is built in. A handler of iopath for another scheme is named by --path-handler, or by
$KSCL_PATH_HANDLERS, which every process of a run inherits.
"""

from __future__ import annotations

import glob
import hashlib
import http.client
import importlib
import logging
import os
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any

from iopath.common.file_io import HTTPURLHandler, PathHandler, PathManager, file_lock

from kscl.errors import KsclError
from kscl.runtime.failures import DISK_FULL
from kscl.runtime.files import whole_file

log = logging.getLogger(__name__)

DOWNLOADS = "downloads"  # the folder of downloaded files inside the cache folder
STALL_SECONDS = 60.0  # without a single byte
ATTEMPTS = 5
BACKOFF_SECONDS = 1.0  # before the second attempt, and twice as long before each further one
TEMPORARY = (408, 425, 429)  # of the answers below 500; the others will not change
HANDLERS_VARIABLE = "KSCL_PATH_HANDLERS"
# Weights that have a name; kscl/backbone_file/named.py finds their files.
TIMM, HUB, TORCHVISION, DETECTRON2 = "timm:", "hf-hub:", "torchvision:", "detectron2://"


class Urls(HTTPURLHandler):
    """Opens an address as a stream; `cached_file` downloads one.

    iopath's own handler caches by the address's path alone, so that two hosts would share a file.
    """

    def _get_supported_prefixes(self) -> list[str]:
        return ["http://", "https://"]

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> IO[Any]:
        self._check_kwargs(kwargs)
        return urllib.request.urlopen(path, timeout=STALL_SECONDS)


path_manager = PathManager()
path_manager.set_logging(False)  # no telemetry of what is opened
path_manager.register_handler(Urls())


def register_handler(name: str) -> None:
    """Register an iopath handler by `module:Class`, here and in the processes started from here."""
    module, _, attribute = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise KsclError(
            f"--path-handler {name} cannot be used: {error}. Write module:Class, of a subclass of "
            "iopath's PathHandler whose module can be imported."
        ) from error
    if not isinstance(made, PathHandler):
        raise KsclError(f"--path-handler {name} is not a subclass of iopath's PathHandler.")
    path_manager.register_handler(made, allow_override=True)
    known = os.environ.get(HANDLERS_VARIABLE, "").split()
    os.environ[HANDLERS_VARIABLE] = " ".join(dict.fromkeys([*known, name]))


for _name in os.environ.get(HANDLERS_VARIABLE, "").split():
    register_handler(_name)


def is_url(path: str | Path) -> bool:
    """Return whether this is an http(s) address and not a local path."""
    return str(path).startswith(("http://", "https://"))


def is_named(weights: str | Path) -> bool:
    """Return whether weights are given by a name or an address and not by a local path."""
    return is_url(weights) or str(weights).startswith((TIMM, HUB, TORCHVISION, DETECTRON2))


def cached_path(path: str, cache: Path) -> Path:
    """Return where a remote file is kept."""
    name = path.partition("?")[0].rpartition("/")[2][-100:]  # its ending tells the format
    digest = hashlib.sha256(path.encode()).hexdigest()[:16]
    return cache / DOWNLOADS / f"{digest}_{name}"


def cached_file(path: str, cache: Path) -> Path:
    """Return the cached copy of a remote file, fetched if it is new."""
    target = cached_path(path, cache)
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(str(target)):  # ranks and workers ask at the same time
            if not target.is_file():
                for left in target.parent.glob(f".{glob.escape(target.name)}.*"):
                    left.unlink()  # of a process that was killed: nobody else has the lock
                _fetch(path, target)
    except OSError as error:
        raise KsclError(
            f"{path} cannot be saved to {target.parent} ({error}): choose another DATA.CACHE_DIR, "
            "or download it by hand and give the file's path."
        ) from error
    return target


def _fetch(path: str, target: Path) -> None:
    """Copy a remote file to a local one, whole or not at all; try again if the connection fails."""
    for attempt in range(ATTEMPTS):
        try:
            _copy(path, target)
            return
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise
            reason = error
        code = reason.code if isinstance(reason, urllib.error.HTTPError) else 500
        if isinstance(reason, ValueError) or (code < 500 and code not in TEMPORARY):
            break
        if attempt + 1 < ATTEMPTS:
            wait = BACKOFF_SECONDS * 2**attempt
            log.warning("%s: %s; trying again in %g s.", path, reason, wait)
            time.sleep(wait)
    raise KsclError(
        f"{path} cannot be fetched to {target.parent} ({reason}), tried {attempt + 1} times: check "
        "the address and the connection, or download it by hand and give the file's path."
    ) from reason


def _copy(path: str, target: Path) -> None:
    with whole_file(target) as file, path_manager.open(path, "rb") as remote:
        shutil.copyfileobj(remote, file, 2**20)
        if left := getattr(remote, "length", None):  # of an HTTP answer: bytes still to come
            raise ConnectionError(f"the connection ended {left:,} bytes too early")
        if not file.tell():
            raise ConnectionError("it is empty")
