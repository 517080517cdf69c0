"""A board inside a document: between two marks, so that no number there is typed by hand.

<!-- board demo -->
…
<!-- end of board demo -->
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kscl.errors import KsclError
from kscl.files import write_atomically
from kscl.leaderboard.reading import Loaded
from kscl.leaderboard.rows import Board
from kscl.logs import clock


def insert(path: Path, name: str, content: str) -> None:
    """Replace what stands between the marks of this name."""
    start, end = f"<!-- board {name} -->", f"<!-- end of board {name} -->"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KsclError(f"--insert {path}: {error.strerror}") from error
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise KsclError(f"--insert: {path} must hold, once and in this order, {start} and {end}")
    pattern = re.escape(start) + ".*?" + re.escape(end)
    block = f"{start}\n{content.strip()}\n{end}"
    write_atomically(path, re.sub(pattern, lambda _: block, text, flags=re.DOTALL).encode())


def origin(board: Board) -> str:
    """Where the numbers come from: seeds, code, machine and time, as the records have them."""
    records = [loaded for row in board.rows for loaded in row.records]
    commits = sorted({_commit(loaded) for loaded in records})
    machines = {
        f"{hardware['cores']} cores of {hardware['cpu']}"
        + (f", {', '.join(hardware['gpus'])}" if hardware["gpus"] else "")
        for hardware in (loaded.record["hardware"] for loaded in records)
    }
    seeds = sorted({str(loaded.record["seed"]) for loaded in records}, key=lambda s: (len(s), s))
    by_kind: dict[str, float] = {}
    for loaded in records:
        kind = loaded.record["kind"]
        by_kind[kind] = by_kind.get(kind, 0.0) + loaded.record["seconds"]
    times = ", ".join(f"{kind} {clock(seconds)}" for kind, seconds in by_kind.items())
    return (
        f"From {len(records)} records; seeds {', '.join(seeds)}; code {', '.join(commits)}; "
        f"{', '.join(sorted(machines))}. Time in all, stages added up: {times}."
    )


def _commit(loaded: Loaded) -> str:
    code: dict[str, Any] = loaded.record["code"]
    named = str(code.get("commit") or code["version"])[:9]
    return f"{named} with changes" if code.get("dirty") else named
