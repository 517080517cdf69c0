"""Find stale rows: code, data or backbone file differ from what was recorded.

Only hashes count. A file or folder that does not exist here says nothing: the record may come from
another machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from kscl.benchmark.leaderboard.details import inside, text
from kscl.benchmark.leaderboard.linking import made_backbone
from kscl.benchmark.leaderboard.reading import RecordFile
from kscl.errors import KsclError
from kscl.records.fingerprint import fingerprint
from kscl.records.provenance import source_hash
from kscl.runtime.files import sha256_of

BACKBONE_FILE = "backbone.safetensors"

Hash = Callable[[Path], str | None]


def stale_reasons(records: Sequence[RecordFile]) -> dict[str, list[str]]:
    """Return record id → what changed since; a record that still holds is not in it."""
    # Many records share their data: each path is read once, and only for this call.
    data_hash, file_hash = functools.cache(_fingerprint), functools.cache(_sha256)
    code_hash = functools.cache(source_hash)
    found = {}
    for file in records:
        reasons = [
            *_code(file, code_hash(tuple(file.record.code.modules))),
            *_data(file, data_hash),
            *_backbone(file, file_hash),
        ]
        if reasons:
            found[file.id] = reasons
    return found


def changed_data(file: RecordFile) -> list[str]:
    """Return one sentence for each set of a record that is here and differs from what it was."""
    return _data(file, _fingerprint)


def _code(file: RecordFile, now: str | None) -> list[str]:
    then = file.record.code.source_hash
    return [f"The code was {then} and is {now}."] if now and then != now else []


def _data(file: RecordFile, hash_of: Hash) -> list[str]:
    reasons = []
    trained_on = text(inside(file.record.config.values, "DATA", "TRAIN"))
    for role, recorded in sorted(file.record.data.items()):
        parts = inside(recorded, "parts")  # of data in several folders
        for part in parts if isinstance(parts, list) else [recorded]:
            path, then = text(inside(part, "path")), text(inside(part, "hash"))
            if path is None and file.record.kind == "pretrain":
                path = trained_on
            now = hash_of(Path(path)) if path and then else None
            if now is not None and now != then:
                reasons.append(f"The {role} data was {then} and is {now}.")
    return reasons


def _backbone(file: RecordFile, hash_of: Hash) -> list[str]:
    then = made_backbone(file.record)
    if then is None:
        return []
    name = text(inside(file.record.details, "files", "backbone")) or BACKBONE_FILE
    now = hash_of(file.path.parent / name)
    return [f"The backbone file was {then[:16]} and is {now[:16]}."] if now and now != then else []


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
