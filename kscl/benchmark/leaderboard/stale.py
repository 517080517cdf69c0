"""Rows that the world has moved on from: code, data or backbone file differ from what was recorded.

By hash alone. A file or folder that is not here says nothing: the record may come from elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from kscl.benchmark.leaderboard.details import inside, text
from kscl.benchmark.leaderboard.linking import made_backbone
from kscl.benchmark.leaderboard.reading import Loaded
from kscl.errors import KsclError
from kscl.records.fingerprint import fingerprint
from kscl.runtime.files import sha256_of

BACKBONE_FILE = "backbone.safetensors"

Hash = Callable[[Path], str | None]


def stale_reasons(
    records: Sequence[Loaded], source_hash: Callable[[str], str]
) -> dict[str, list[str]]:
    """Record id → what changed since; a record that still stands is not in it."""
    # Many records share their data: each place is read once, and only for this call.
    data_hash, file_hash = functools.cache(_fingerprint), functools.cache(_sha256)
    found = {}
    for loaded in records:
        reasons = [
            *_code(loaded, source_hash(loaded.record["kind"])),
            *_data(loaded, data_hash),
            *_backbone(loaded, file_hash),
        ]
        if reasons:
            found[loaded.id] = reasons
    return found


def _code(loaded: Loaded, now: str) -> list[str]:
    then = loaded.record["code"]["source_hash"]
    return [f"code was {then}, is {now}"] if then != now else []


def _data(loaded: Loaded, hash_of: Hash) -> list[str]:
    reasons = []
    trained_on = text(inside(loaded.record, "config", "values", "DATA", "TRAIN"))
    for role, recorded in sorted(loaded.record["data"].items()):
        parts = inside(recorded, "parts")  # of data that lies in several places
        for part in parts if isinstance(parts, list) else [recorded]:
            path, then = text(inside(part, "path")), text(inside(part, "hash"))
            if path is None and loaded.record["kind"] == "pretrain":
                path = trained_on
            now = hash_of(Path(path)) if path and then else None
            if now is not None and now != then:
                reasons.append(f"{role} data was {then}, is {now}")
    return reasons


def _backbone(loaded: Loaded, hash_of: Hash) -> list[str]:
    then = made_backbone(loaded.record)
    if then is None:
        return []
    name = text(inside(loaded.record, "details", "files", "backbone")) or BACKBONE_FILE
    now = hash_of(loaded.path.parent / name)
    return [f"backbone file was {then[:16]}, is {now[:16]}"] if now and now != then else []


def _fingerprint(path: Path) -> str | None:
    try:
        return fingerprint(path).hash
    except (KsclError, OSError):
        return None


def _sha256(path: Path) -> str | None:
    try:
        return sha256_of(path) if path.is_file() else None
    except OSError:
        return None
