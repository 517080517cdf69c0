"""The project's PathManager: local paths as they are, and http(s) addresses as cached files."""

from __future__ import annotations

import hashlib
import logging
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from iopath.common.download import download
from iopath.common.file_io import HTTPURLHandler, PathManager, file_lock

from kscl.errors import KsclError

log = logging.getLogger(__name__)

DOWNLOADS = "downloads"  # the folder of downloaded files inside the cache folder
TIMEOUT_SECONDS = 60  # without a single byte


class CachedUrls(HTTPURLHandler):
    """Downloads an address once, into a file whose name tells addresses apart.

    iopath's own handler names it by the address's path alone, so that two hosts would share a file.
    """

    def _get_supported_prefixes(self) -> list[str]:
        return ["http://", "https://"]

    def _get_local_path(
        self, path: str, force: bool = False, cache_dir: str | None = None, **kwargs: Any
    ) -> str:
        self._check_kwargs(kwargs)
        if cache_dir is None:
            raise KsclError(f"{path}: give a cache folder to download to.")
        name = Path(urlparse(path).path).name[-100:]  # its ending tells the format
        digest = hashlib.sha256(path.encode()).hexdigest()[:16]
        target = Path(cache_dir) / DOWNLOADS / f"{digest}_{name}"
        before = socket.getdefaulttimeout()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(str(target)):  # ranks ask at the same time
                if not target.is_file():
                    socket.setdefaulttimeout(TIMEOUT_SECONDS)
                    log.info("Downloading %s to %s.", path, target)
                    download(path, str(target.parent), filename=target.name, progress=False)
        except (OSError, ValueError) as error:  # HTTP errors, short files and time-outs among them
            raise KsclError(
                f"{path} cannot be downloaded to {target.parent} ({error}): check the address and "
                "the connection, or download it by hand and give the file's path."
            ) from error
        finally:
            socket.setdefaulttimeout(before)
        return str(target)


path_manager = PathManager()
path_manager.set_logging(False)  # no telemetry of what is opened
path_manager.register_handler(CachedUrls())


def is_url(path: str | Path) -> bool:
    """Return whether this is an http(s) address and not a local path."""
    return str(path).startswith(("http://", "https://"))


def local_path(path: str | Path, cache: Path) -> Path:
    """Return a local path as it is, or the cached file of an address, downloaded if it is new."""
    if not is_url(path):
        return Path(path)
    return Path(path_manager.get_local_path(str(path), cache_dir=str(cache)))
