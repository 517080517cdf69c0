"""Every file below a folder, whatever else lies there: links, loops of links, pipes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from kscl.data.formats import is_image
from kscl.data.source import Lost
from kscl.errors import KsclError


@dataclass
class Walk:
    """What a walk has met besides files."""

    folders: list[str] = field(default_factory=list)  # absolute
    times: list[int] = field(default_factory=list)  # of each folder's last change, in ns
    lost: list[Lost] = field(default_factory=list)


def walk_files(root: str, met: Walk) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield (path relative to the root with /, entry) of every regular file below a folder.

    Hidden files do not count. Links are followed; a folder that is reachable in several ways is
    entered once, by its own name if it lies below the root. A link that leads nowhere and a pipe
    named like an image are noted as lost. A folder that cannot be listed is an error.
    """
    base = os.path.abspath(root)
    waiting, links, visited = [""], list[str](), set()
    while waiting or links:
        if not waiting:
            links.sort(reverse=True)  # the order of a copy may differ
        prefix = waiting.pop() if waiting else links.pop()
        folder = os.path.join(base, prefix)
        try:
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in visited:
                continue  # a link back up the tree
            visited.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as listed:
                entries = list(listed)
        except OSError as error:
            raise KsclError(
                f"{folder} cannot be listed: {error.strerror}. Make it readable, or remove it."
            ) from error
        met.folders.append(folder)
        met.times.append(status.st_mtime_ns)
        for entry in entries:
            if entry.name.startswith("."):
                continue  # hidden, and the shadow files that macOS leaves
            name = prefix + entry.name
            try:
                if entry.is_dir():
                    (links if entry.is_symlink() else waiting).append(f"{name}/")
                elif entry.is_file():
                    yield name, entry
                elif entry.is_symlink() and not os.path.exists(entry.path):
                    met.lost.append(Lost(entry.path, "the link leads nowhere"))
                elif is_image(entry.name):
                    met.lost.append(Lost(entry.path, "it is not a regular file"))
            except OSError as error:  # a link to itself, or into a folder that is closed to us
                met.lost.append(Lost(entry.path, error.strerror or str(error)))
