"""What is in `results/`: one folder per submission, and the protocols that are known."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from kscl.errors import KsclError
from kscl.records.record import RECORD_FILE, Json, Record

RESULTS = Path("results")
PROTOCOLS_FILE = "protocols.json"  # hash → kind, id and definition; reviewed like code
README_FILE = "README.md"
CONFIGS, CERTIFICATES = "configs", "certificates"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def stem(record: Record) -> str:
    """Return what the files of a record are called in a submission."""
    return f"{record.kind}-{record.id[:16]}"


def record_name(record: Record) -> str:
    """Return the file name of a record in a submission."""
    return f"{stem(record)}.{RECORD_FILE}"


def submissions(results: Path) -> list[Path]:
    """Return the folder of every submission."""
    return sorted(path for path in results.iterdir() if path.is_dir() and path.name[0] != ".")


def known_protocols(results: Path) -> Json:
    """Return the protocols that submissions may be measured under, by hash."""
    path = results / PROTOCOLS_FILE
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise KsclError(f"{path}: The list of protocols cannot be read: {error}.") from error
    if not isinstance(content, dict) or not all(isinstance(it, dict) for it in content.values()):
        raise KsclError(f"{path}: It must be an object with an object for each protocol hash.")
    return content


def strings(value: object, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield (where, text) of every key and every text in plain JSON content."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            where = f"{place}.{key}" if place else str(key)
            yield where, str(key)
            yield from strings(inner, where)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner, place)
