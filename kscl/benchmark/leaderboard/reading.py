"""Folders of records in, every distinct record out, and by name whatever was not taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kscl.records.record import Json, RecordError, find_records


@dataclass(frozen=True)
class Loaded:
    """A record, the file it lies in, and how that file is called in the outputs."""

    record: Json
    path: Path
    root: Path  # nothing outside of it is ever read into an output
    shown: str

    @property
    def id(self) -> str:
        return str(self.record["id"])


@dataclass
class Reading:
    records: list[Loaded] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_folders(folders: Sequence[str | Path]) -> Reading:
    """All records below the folders, each once, in an order that depends on nothing but them."""
    reading = Reading()
    seen: dict[str, Loaded] = {}
    files: set[Path] = set()
    for folder in folders:
        root = Path(folder)
        found = find_records(root)
        prefix = f"{root.resolve().name}/" if len(folders) > 1 else ""
        for path, problem in found.problems.items():
            if _is_new(path, files):
                shown = prefix + path.relative_to(root).as_posix()
                reading.problems.append(problem.replace(str(path), shown))
        for path, record in found.records.items():
            if not _is_new(path, files):
                continue
            loaded = Loaded(record, path, root, prefix + path.relative_to(root).as_posix())
            first = seen.setdefault(loaded.id, loaded)
            if first is not loaded:
                reading.problems.append(
                    f"{loaded.shown}: the same record as {first.shown}; it counts once"
                )
    if not seen:
        places = ", ".join(str(folder) for folder in folders)
        reasons = "".join(f"\n  {problem}" for problem in reading.problems)
        raise RecordError(f"{places}: no record to make a leaderboard of{reasons}")
    reading.records = sorted(seen.values(), key=_order)
    return reading


def _is_new(path: Path, files: set[Path]) -> bool:
    """Not so where one folder was given twice, or lies inside another."""
    place = path.resolve()
    is_new = place not in files
    files.add(place)
    return is_new


def _order(loaded: Loaded) -> tuple[str, str]:
    return str(loaded.record["created"]), loaded.id
