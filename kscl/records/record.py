"""The run record: one JSON file per run, written once, that says what was measured and from what.

Every evaluation writes one, and the leaderboard reads nothing else. A record is checked when it is
written and again when it is read: it is taken whole or reported by name, never half-read.
docs/record.md describes every field.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import math
import reprlib
import stat
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any

from fvcore.common.config import CfgNode

from kscl.config import config_hash, config_values
from kscl.errors import KsclError, printable
from kscl.records.provenance import code_version, library_versions, source_hash
from kscl.runtime.files import write_atomically
from kscl.runtime.machine import costs, hardware

SCHEMA = "kscl-record"
VERSION = 1
RECORD_FILE = "record.json"
RECORDS_FILE = ".records.jsonl"  # ends the name of a file with one record per line; FILE:3 is one
LEAST_AP50 = 5.0  # percent: a detector below it is not ranked
WORKING_AP50 = 25.0  # percent: a detector below it misses or mislabels most objects
LONGER = "longer"  # in details: how many times as long it was trained as its protocol says
MAX_BYTES = 64 * 2**20  # a record holds thinned curves and one bit per test image, never more

LARGE = 1e15  # sums and squares of smaller numbers stay finite
MAX_DEPTH = 64
MAX_LISTED = 5

WORDS: dict[Any, str] = {
    str: "text",
    int: "a whole number of 64 bits",
    float: f"a finite number below {LARGE:g}",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    type(None): "null",
}

Json = dict[str, Any]


class RecordError(KsclError):
    """A file that is not a record that can be trusted."""


@dataclass(frozen=True)
class Protocol:
    """A name, and a hash of everything that must be equal for two numbers to be comparable."""

    id: str
    definition: Json
    hash: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hash", digest(self.definition)[:16])


@dataclass(frozen=True)
class Metric:
    """A number that a task reports, and how the leaderboard shows and compares it."""

    name: str
    label: str
    digits: int = 2
    headline: bool = False  # ranks the rows; every evaluation has one
    lower_is_better: bool = False
    per_image: bool = False  # the percentage of test images that were right
    unranked_below: float | None = None  # such a result says nothing about its row
    working_from: float | None = None  # below it the network has hardly begun to learn


@dataclass(frozen=True)
class TaskInfo:
    """The task as a reader of the record sees it: the leaderboard imports no task."""

    name: str
    title: str
    stage: str
    hub_task: str
    metrics: list[Metric]  # in the order of the columns; others are not shown as columns

    @property
    def headline(self) -> Metric:
        """Return the metric that ranks; every task but pretraining has one."""
        return next(metric for metric in self.metrics if metric.headline)


@dataclass(frozen=True)
class RecordedConfig:
    """The settings of a run, and a hash of those that can change a result."""

    hash: str
    values: Json


@dataclass(frozen=True)
class CodeVersion:
    """The code that ran; see `kscl.records.provenance.code_version`."""

    version: str
    commit: str | None  # None where it cannot be known
    dirty: bool | None
    modules: list[str]  # whose syntax, with all that they import, is hashed
    source_hash: str


@dataclass(frozen=True)
class Record:
    """One run: what was measured, and from what. The fields are those of the JSON file."""

    schema: str
    version: int
    id: str  # sha256 of all other fields
    kind: str
    task: TaskInfo
    name: str
    created: str  # when the run ended, ISO 8601 with a time zone
    seconds: float
    seed: int
    protocol: Protocol
    metrics: dict[str, float]
    details: Json  # what is not a single number; see kscl/benchmark/leaderboard/__init__.py
    config: RecordedConfig
    data: dict[str, dict[str, Any]]  # role → fingerprint
    inputs: dict[str, str]  # role → sha256 of a file that an earlier stage made
    code: CodeVersion
    libraries: dict[str, str | None]  # name → version, None where it is not installed
    hardware: Json

    def __getitem__(self, name: str) -> Any:
        """Return a field by its name, nested ones as they are in the JSON file."""
        value = getattr(self, name)
        nested = dataclasses.is_dataclass(value) and not isinstance(value, type)
        return dataclasses.asdict(value) if nested else value

    def as_dict(self) -> Json:
        """Return the content of the JSON file."""
        return {part.name: self[part.name] for part in dataclasses.fields(self)}


@dataclass
class Found:
    """The good records below a folder, and why each other file is not one."""

    records: dict[Path, Record] = field(default_factory=dict)
    problems: dict[Path, str] = field(default_factory=dict)


def make_record(
    *,
    kind: str,
    task: TaskInfo,
    name: str,
    protocol: Protocol,
    metrics: Mapping[str, float],
    seconds: float,
    seed: int,
    cfg: CfgNode,
    data: Mapping[str, Mapping[str, Any]],
    inputs: Mapping[str, str] | None = None,
    details: Mapping[str, Any] | None = None,
    without_effect: tuple[str, ...],
    modules: Sequence[str] = (),
) -> Record:
    """Return a complete record of a run that has just ended on this machine.

    `data` maps a role ("train", "test") to a fingerprint; `inputs` maps a role ("backbone") to
    the sha256 of the file that an earlier stage made; `details` holds what is not a single number.
    `modules` are those of the task and of what it loads by name: their code makes the number. The
    fingerprints enter the protocol's hash: numbers on other data are never comparable.
    """
    from kscl.runtime.precision import numerics  # with torch, which readers of records do without

    on_this_data = {role: print_["hash"] for role, print_ in data.items()}
    protocol = Protocol(protocol.id, {**protocol.definition, "data": on_this_data})
    content: Json = {
        "schema": SCHEMA,
        "version": VERSION,
        "kind": kind,
        "task": dataclasses.asdict(task),
        "name": name,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": float(seconds),
        "seed": seed,
        "protocol": vars(protocol),
        "metrics": dict(metrics),
        "details": {"numerics": numerics(), "costs": costs(), **(details or {})},
        "config": {"hash": config_hash(cfg, without_effect), "values": config_values(cfg)},
        "data": {role: dict(print_) for role, print_ in data.items()},
        "inputs": dict(inputs or {}),
        "code": {
            **code_version(),
            "modules": list(modules),
            "source_hash": source_hash(modules) or "unknown",
        },
        "libraries": library_versions(),
        "hardware": hardware(),
    }
    return parse_record({**content, "id": record_id(content)})


def write_record(record: Record, path: str | Path, part: str = "") -> Path:
    """Write the record once and atomically; a folder gets `record.json` in it.

    A run with several records gives the others a name of their own, `PART.record.json`. These are
    written first: a run that was killed before its `record.json` writes them again.
    """
    path = Path(path)
    if path.suffix != ".json":
        path = path / (f"{part}.{RECORD_FILE}" if part else RECORD_FILE)
    text = json.dumps(record.as_dict(), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(path, f"{text}\n".encode(), replace=bool(part))
    return path


def read_record(path: str | Path) -> Record:
    """Return the record in this file; raise a RecordError that names the file and the reason.

    The third of a submission is `results/NAME.records.jsonl:3`.
    """
    try:
        contents = _contents(file_and_line(Path(path))[0])
        if Path(path) not in contents:
            raise RecordError(
                f"There is no such line: it has {len(contents)} records; :1 is the first."
            )
        return parse_record(_from_json(contents[Path(path)]))
    except RecordError as error:
        raise RecordError(f"{printable(str(path))}: {error}") from error


def file_and_line(path: Path) -> tuple[Path, int | None]:
    """Return the file that a record is in, and its line in a file of several."""
    name, _, line = path.name.rpartition(":")
    is_line = name.endswith(RECORDS_FILE) and line.isdecimal()
    return (path.with_name(name), int(line)) if is_line else (path, None)


def find_records(folder: str | Path) -> Found:
    """Read every record below a folder, or in a file of several.

    A broken or foreign file or line is reported and skipped.
    """
    root = Path(folder)
    if not (root.is_dir() or (root.is_file() and root.name.endswith(RECORDS_FILE))):
        raise RecordError(f"{folder}: There is no such folder of records.")
    found = Found()
    for path in sorted(root.rglob("*.json*")) if root.is_dir() else [root]:
        if path.name == RECORD_FILE or path.name.endswith((f".{RECORD_FILE}", RECORDS_FILE)):
            try:
                contents = _contents(path)
            except RecordError as error:
                found.problems[path] = str(error)
                continue
            for place, content in contents.items():
                try:
                    found.records[place] = parse_record(_from_json(content))
                except RecordError as error:
                    found.problems[place] = str(error)
    return found


def parse_record(content: object) -> Record:
    """Return the record with this JSON content.

    Raise a RecordError with the reasons, on one line, unless it is complete, unaltered and of a
    known version.
    """
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise RecordError(f"It is not a record: it does not have the schema '{SCHEMA}'.")
    version = content.get("version")
    if type(version) is not int or version < 1:
        raise RecordError(f"Its version {shown(version)} is not a record version.")
    if version > VERSION:
        raise RecordError(
            f"It was written by a newer release (record version {shown(version)}, this one reads "
            f"up to {VERSION}): upgrade to read it."
        )
    if is_too_deep(content):
        raise RecordError(f"It is nested more than {MAX_DEPTH} levels deep.")
    problems = list(wrong_places(content, Record)) or _wrong_values(content)
    if problems:
        raise RecordError(f"It is not a complete record: {listed(problems)}.")
    if content["id"] != record_id(content):
        raise RecordError("Its content does not fit its id: it was changed after it was written.")
    protocol = Protocol(content["protocol"]["id"], content["protocol"]["definition"])
    config, code = RecordedConfig(**content["config"]), CodeVersion(**content["code"])
    metrics = [Metric(**about) for about in content["task"]["metrics"]]
    task = TaskInfo(**{**content["task"], "metrics": metrics})
    nested = {"task": task, "protocol": protocol, "config": config, "code": code}
    return Record(**{**content, **nested})


def record_id(content: Json) -> str:
    """Return the hash of all fields but the id itself."""
    return digest({name: value for name, value in content.items() if name != "id"})


def _wrong_values(content: Json) -> list[str]:
    """List what is wrong with content whose types are right."""
    problems = []
    if not content["metrics"]:
        problems.append("metrics is empty: nothing was measured")
    headlines = [about["name"] for about in content["task"]["metrics"] if about["headline"]]
    if content["kind"] != "pretrain" and [n in content["metrics"] for n in headlines] != [True]:
        problems.append(f"task.metrics must have one headline that was measured, got {headlines}")
    if content["seconds"] < 0:
        problems.append(f"seconds is {content['seconds']}, which is negative")
    if not _is_time(content["created"]):
        problems.append(f"created is {shown(content['created'])}, not a time with its zone")
    problems += [
        f"data.{one_line(role)}.hash is {shown(print_.get('hash'))}, not text"
        for role, print_ in content["data"].items()
        if type(print_.get("hash")) is not str
    ]
    if content["protocol"]["hash"] != digest(content["protocol"]["definition"])[:16]:
        problems.append("protocol.hash does not fit protocol.definition")
    return problems


def _is_time(text: str) -> bool:
    try:
        return datetime.datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _contents(path: Path) -> dict[Path, bytes]:
    """Return the text of every record in a file of a sensible size; FILE:3 is one of several."""
    try:
        status = path.stat()
        # A pipe would be waited for and a device read without end.
        if not stat.S_ISREG(status.st_mode):
            raise RecordError("It is not a regular file.")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecordError(f"It cannot be read: {error.strerror}.") from error
    if len(content) > MAX_BYTES:
        raise RecordError(f"It is larger than {MAX_BYTES:,} bytes, which a record never is.")
    if not path.name.endswith(RECORDS_FILE):
        return {path: content}
    lines = enumerate(content.split(b"\n"), 1)
    return {Path(f"{path}:{number}"): line for number, line in lines if line.strip()}


def _from_json(content: bytes) -> object:
    try:
        return json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError as error:
        raise RecordError("It is not readable as JSON: it is nested too deeply.") from error
    except ValueError as error:
        raise RecordError(f"It is not readable as JSON: {one_line(str(error))}.") from error


def digest(value: object) -> str:
    """Return the sha256 of a value in canonical JSON."""
    try:
        canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(
            f"A record holds plain finite values only: {one_line(str(error))}."
        ) from error
    return hashlib.sha256(canonical.encode()).hexdigest()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


# The shape of JSON content: a dataclass's fields are the keys, its type hints the types.


def wrong_places(content: object, wanted: Any, name: str = "") -> Iterator[str]:
    """Yield one phrase for each key that is missing, unknown or of another type than `wanted`."""
    kind = dict if dataclasses.is_dataclass(wanted) else typing.get_origin(wanted)
    if kind not in (dict, list):
        choices = typing.get_args(wanted) if isinstance(wanted, UnionType) else (wanted,)
        if not any(_is(content, choice) for choice in choices):
            words = " or ".join(WORDS[choice] for choice in choices)
            yield f"{name} is {shown(content)}, not {words}"
    elif not isinstance(content, kind):
        yield f"{name} is {shown(content)}, not {WORDS[kind]}"
    elif dataclasses.is_dataclass(wanted):
        hints, prefix = _hints(typing.cast(type, wanted)), f"{name}." if name else ""
        for key, hint in hints.items():
            if key in content:
                yield from wrong_places(content[key], hint, f"{prefix}{key}")
            else:
                yield f"{prefix}{key} is missing"
        yield from (
            f"{prefix}{one_line(key)} is not a field" for key in content if key not in hints
        )
    elif (of_item := typing.get_args(wanted)[-1]) is not Any:
        for at, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from wrong_places(value, of_item, f"{name}.{one_line(str(at))}")


def is_too_deep(content: object, levels: int = MAX_DEPTH) -> bool:
    """Return whether containers are nested more than so many levels deep."""
    if not isinstance(content, dict | list):
        return False
    inner = content.values() if isinstance(content, dict) else content
    return levels == 0 or any(is_too_deep(item, levels - 1) for item in inner)


def shown(value: object) -> str:
    """Return a value as short text on one line, however large it is."""
    return one_line(reprlib.repr(value))


def one_line(text: str) -> str:
    """Return the text in printable characters, without its middle if it is long."""
    return printable(text if len(text) <= 200 else f"{text[:100]}…{text[-90:]}")


def listed(problems: list[str]) -> str:
    """Join the first few problems, and count the others."""
    more = len(problems) - MAX_LISTED
    return "; ".join(problems[:MAX_LISTED]) + (f"; and {more:,} more" if more > 0 else "")


@functools.cache  # resolving them anew was a third of the time of reading a record
def _hints(wanted: Any) -> dict[str, Any]:
    return typing.get_type_hints(wanted)


def _is(value: object, wanted: Any) -> bool:
    if wanted is float:
        is_number = type(value) in (int, float)
        return is_number and abs(value) < LARGE and math.isfinite(value)  # type: ignore
    if wanted is int:
        return type(value) is int and -(2**63) <= value < 2**63
    return type(value) is wanted
