"""Read folders of records: every distinct record, and by name whatever was not counted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kscl.errors import printable
from kscl.records.record import Record, RecordError, find_records


@dataclass(frozen=True)
class RecordFile:
    """A record, the file it was read from, and how that file is called in the outputs."""

    record: Record
    path: Path
    root: Path  # nothing outside of it is ever read into an output
    shown: str

    @property
    def id(self) -> str:
        """Return the record's id."""
        return self.record.id


@dataclass
class Reading:
    """The records to count, and one line for each file that is not counted."""

    records: list[RecordFile] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_folders(folders: Sequence[str | Path]) -> Reading:
    """Return all records below the folders, each once, in an order that depends only on them."""
    reading = Reading()
    seen: dict[str, RecordFile] = {}
    files: set[str] = set()
    for folder in folders:
        root = Path(folder)
        found = find_records(root)
        prefix = f"{Path(os.path.realpath(root)).name}/" if len(folders) > 1 else ""

        def shown(path: Path, root: Path = root, prefix: str = prefix) -> str:
            return printable(prefix + path.relative_to(root).as_posix())

        for path, problem in found.problems.items():
            if _is_new(path, files):
                reading.problems.append(f"{shown(path)}: {problem}")
        for path, record in found.records.items():
            if not _is_new(path, files):
                continue
            file = RecordFile(record, path, root, shown(path))
            first = seen.setdefault(file.id, file)
            if first is not file:
                reading.problems.append(
                    f"{file.shown}: It is the same record as {first.shown}, which is counted once."
                )
    if not seen:
        searched = ", ".join(str(folder) for folder in folders)
        reasons = "".join(f"\n  {problem}" for problem in reading.problems)
        raise RecordError(f"{searched}: There is no record to make a leaderboard of.{reasons}")
    reading.records = sorted(seen.values(), key=lambda file: (file.record.created, file.id))
    return reading


def _is_new(path: Path, files: set[str]) -> bool:
    """Tell whether a file was not met before, through a folder given twice or inside another."""
    real = os.path.realpath(path)
    is_new = real not in files
    files.add(real)
    return is_new
