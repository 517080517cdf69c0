"""A picture that a record names, as a data URI: only a picture, only from the records' folder."""

from __future__ import annotations

import base64
import os
from pathlib import Path

from kscl.benchmark.leaderboard.details import text
from kscl.benchmark.leaderboard.reading import RecordFile

BESIDE = "basis.png"
MAX_BYTES = 2 * 2**20  # the page stays one that can be mailed

# An SVG can contain a program, so it is not among them.
STARTS = {
    "image/png": (b"\x89PNG\r\n\x1a\n", 0),
    "image/jpeg": (b"\xff\xd8\xff", 0),
    "image/webp": (b"WEBP", 8),
}


def basis_figure(file: RecordFile) -> str | None:
    """Return the record's `basis_figure`, or the one drawn beside a pretraining's record."""
    named = text(file.record.details.get("basis_figure"))
    beside = BESIDE if file.record.kind == "pretrain" else None
    path = file_of(file, named or beside)
    try:
        if path is None or path.stat().st_size > MAX_BYTES:
            return None
        content = path.read_bytes()
    except OSError:
        return None
    for kind, (start, offset) in STARTS.items():
        if content[offset:].startswith(start):
            return f"data:{kind};base64,{base64.b64encode(content).decode()}"
    return None


def file_of(file: RecordFile, name: object) -> Path | None:
    """Return a file that a record names, if it exists and is inside the folder that was read."""
    words = text(name)
    if words is None or "\0" in words:
        return None
    try:
        path = Path(os.path.realpath(file.path.parent / words))
        is_ours = path.is_relative_to(os.path.realpath(file.root)) and path.is_file()
    except (OSError, ValueError):
        return None
    return path if is_ours else None
