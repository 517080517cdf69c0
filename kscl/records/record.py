"""The run record: one JSON file a run, written once, that says what was measured and from what.

Every evaluation writes one and the leaderboard reads nothing else. A record is checked when it is
written and again when it is read: it is taken whole or reported by name, never half-read.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from kscl.config.defaults import WITHOUT_EFFECT_ON_RESULTS
from kscl.config.tree import config_hash, config_values
from kscl.errors import KsclError
from kscl.records.provenance import code_version, library_versions
from kscl.runtime.files import write_atomically
from kscl.runtime.machine import hardware

SCHEMA = "kscl-record"
VERSION = 1
RECORD_FILE = "record.json"
KINDS = ("pretrain", "linear", "knn", "detection")

Json = dict[str, Any]

# field: (type, what must be inside)
_FIELDS: dict[str, tuple[type, tuple[str, ...]]] = {
    "schema": (str, ()),
    "version": (int, ()),
    "id": (str, ()),
    "kind": (str, ()),
    "name": (str, ()),
    "created": (str, ()),
    "seconds": (float, ()),
    "seed": (int, ()),
    "protocol": (dict, ("id", "hash", "definition")),
    "metrics": (dict, ()),
    "details": (dict, ()),
    "config": (dict, ("hash", "values")),
    "data": (dict, ()),
    "inputs": (dict, ()),
    "code": (dict, ("version", "commit", "dirty", "source_hash")),
    "libraries": (dict, ()),
    "hardware": (dict, ()),
}


class RecordError(KsclError):
    """A file that is not a record that can be trusted."""


@dataclass(frozen=True)
class Protocol:
    """What makes two numbers comparable: a name, and a hash of all that defines it."""

    id: str
    definition: Mapping[str, Any]

    @property
    def hash(self) -> str:
        return _digest(dict(self.definition))[:16]

    def as_dict(self) -> Json:
        return {"id": self.id, "hash": self.hash, "definition": dict(self.definition)}


@dataclass
class Found:
    """What lies below a folder: the good records, and the files that are none with the reason."""

    records: dict[Path, Json] = field(default_factory=dict)
    problems: dict[Path, str] = field(default_factory=dict)


def make_record(
    *,
    kind: str,
    name: str,
    protocol: Protocol,
    metrics: Mapping[str, float],
    seconds: float,
    seed: int,
    cfg: CfgNode,
    data: Mapping[str, Mapping[str, Any]],
    inputs: Mapping[str, str] | None = None,
    details: Mapping[str, Any] | None = None,
    without_effect: tuple[str, ...] = WITHOUT_EFFECT_ON_RESULTS,
) -> Json:
    """A complete record of a run that has just ended on this machine.

    `data` maps a role ("train", "test") to a fingerprint; `inputs` maps a role ("backbone") to
    the sha256 of the file that an earlier stage made; `details` holds what is no single number.
    The fingerprints enter the protocol's hash: numbers on other data are never comparable.
    """
    on_this_data = {role: print_["hash"] for role, print_ in data.items()}
    protocol = Protocol(protocol.id, {**protocol.definition, "data": on_this_data})
    record: Json = {
        "schema": SCHEMA,
        "version": VERSION,
        "kind": kind,
        "name": name,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": float(seconds),
        "seed": seed,
        "protocol": protocol.as_dict(),
        "metrics": dict(metrics),
        "details": dict(details or {}),
        "config": {"hash": config_hash(cfg, without_effect), "values": config_values(cfg)},
        "data": {role: dict(print_) for role, print_ in data.items()},
        "inputs": dict(inputs or {}),
        "code": dict(code_version(kind if kind in KINDS else None)),
        "libraries": library_versions(),
        "hardware": hardware(),
    }
    record["id"] = _record_id(record)
    check_record(record)
    return record


def write_record(record: Json, path: str | Path) -> Path:
    """Write the record once and atomically; a folder gets `record.json` in it."""
    path = Path(path)
    if path.suffix != ".json":
        path = path / RECORD_FILE
    check_record(record)
    text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(path, f"{text}\n".encode(), replace=False)
    return path


def read_record(path: str | Path) -> Json:
    """The record in this file, or a RecordError that names the file and what is wrong with it."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not readable as JSON: {error}") from error
    try:
        check_record(record)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error
    return record


def find_records(folder: str | Path) -> Found:
    """Every record below a folder; a broken or foreign file is reported and skipped."""
    root = Path(folder)
    if not root.is_dir():
        raise RecordError(f"{folder}: no such folder of records")
    found = Found()
    for path in sorted(root.rglob("*.json")):
        if path.name != RECORD_FILE and not path.name.endswith(f".{RECORD_FILE}"):
            continue
        try:
            found.records[path] = read_record(path)
        except RecordError as error:
            found.problems[path] = str(error)
    return found


def check_record(record: object) -> None:
    """Raise a RecordError unless this is a complete, unaltered record of a version we know."""
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise RecordError(f"not a record: it has no schema '{SCHEMA}'")
    version = record.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise RecordError(f"version {version!r} is not a record version")
    if version > VERSION:
        raise RecordError(
            f"written by a newer release (record version {version}, this one reads up to "
            f"{VERSION}): upgrade to read it"
        )
    problems = list(_problems(record))
    if problems:
        raise RecordError("; ".join(problems))
    if record["id"] != _record_id(record):
        raise RecordError("its content does not fit its id: it was changed after it was written")


def _problems(record: Json) -> list[str]:
    problems = []
    for name, (wanted, inside) in _FIELDS.items():
        if name not in record:
            problems.append(f"{name} is missing")
            continue
        value = record[name]
        accepted = (int, float) if wanted is float else wanted
        if isinstance(value, bool) or not isinstance(value, accepted):
            problems.append(f"{name} is {value!r}, not a {wanted.__name__}")
        elif isinstance(value, dict):
            problems += [f"{name}.{part} is missing" for part in inside if part not in value]
    problems += [f"{name} is not a field" for name in record if name not in _FIELDS]
    if problems:
        return problems
    if record["kind"] not in KINDS:
        problems.append(f"kind is {record['kind']!r}, not one of {', '.join(KINDS)}")
    if not record["metrics"]:
        problems.append("metrics is empty: nothing was measured")
    for name, value in record["metrics"].items():
        if not _is_finite(value):
            problems.append(f"metrics.{name} is {value!r}, not a finite number")
    if record["protocol"]["hash"] != _digest(record["protocol"]["definition"])[:16]:
        problems.append("protocol.hash does not fit protocol.definition")
    return problems


def _is_finite(value: object) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:  # a whole number beyond all floats
        return False


def _record_id(record: Json) -> str:
    return _digest({name: value for name, value in record.items() if name != "id"})


def _digest(value: Json) -> str:
    try:
        canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RecordError(f"a record holds plain finite values only: {error}") from error
    return hashlib.sha256(canonical.encode()).hexdigest()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number that JSON knows")
