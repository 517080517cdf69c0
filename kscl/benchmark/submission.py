"""Submissions: `results/NAME.records.jsonl` holds the records of one, without paths and names.

A record contains its config and its certificate, so one file is all that a pull request adds.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import socket
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kscl.benchmark.leaderboard.entries import made_backbone
from kscl.benchmark.leaderboard.reading import inside
from kscl.errors import KsclError, printable
from kscl.records.record import (
    RECORDS_FILE,
    Json,
    Protocol,
    Record,
    RecordError,
    find_records,
    parse_record,
    read_record,
    record_id,
)
from kscl.runtime.files import write_atomically

RESULTS = Path("results")
PROTOCOLS_FILE = "protocols.json"  # hash → kind, id and definition; reviewed like code
README_FILE = "README.md"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NO_EVALUATION = "pretrain"  # has costs, which are shown and never ranked

MAX_BYTES = 4 * 2**20  # of one file
MARKUP = re.compile(r"<\s*[A-Za-z/!?]|&#|javascript:|\bdata:text", re.IGNORECASE)
NOT_WORDS = "right"  # bits as base64, in which a slash is a digit
ALLOWED_CONTROLS = "\n\t"

LEAST_LETTERS = 3  # of a name that is looked for; shorter ones are in half of all words
COMMON_NAMES = ("root", "user", "localhost", "runner")  # name nobody
# A path from the root of a file system: at the start of a text or behind what separates words; two
# slashes are those of an address such as https://.
UNIX = r"""(?:(?<=[\s:=,;'"(\[|])|^)~?/(?!/)[^\s:,;'"()\[\]|]+"""
WINDOWS = r"""(?:(?<=[\s=,;'"(\[|])|^)[A-Za-z]:[\\/][^\s,;'"()\[\]|]+"""
ABSOLUTE = re.compile(f"{UNIX}|{WINDOWS}")
HIDDEN = "…/"  # stands for the folders that were taken out


def submit(paths: Sequence[str], name: str, results: Path, *, new_protocols: bool = False) -> Path:
    """Write the submission of this name, and return its file; nothing is left if it is refused."""
    if not NAME.fullmatch(name):
        raise KsclError(f"--name {name}: Use letters, digits, dots, dashes and underscores.")
    path = results / f"{name}{RECORDS_FILE}"
    if path.exists():
        raise KsclError(f"{path}: The submission exists. Choose another --name, or delete it.")
    records = [_public(record) for record in _records(paths)]
    known = known_protocols(results)
    needed = {
        record.protocol.hash: {
            "kind": record.kind,
            "id": record.protocol.id,
            "definition": record.protocol.definition,
        }
        for record in records
        if record.kind != NO_EVALUATION
    }
    unknown = [hash_ for hash_ in needed if hash_ not in known]
    if unknown and not new_protocols:
        named = ", ".join(f"{needed[hash_]['id']} {hash_}" for hash_ in unknown)
        raise KsclError(
            f"There is no submission under {named} yet. If these settings and data are intended, "
            f"add --new-protocol, which adds them to {results / PROTOCOLS_FILE}."
        )
    known = dict(sorted((known | needed).items()))
    seen = {
        id_: place.name
        for other in submissions(results)
        for place, record in find_records(other).records.items()
        for id_ in _ids(record)
    }
    placed = {f"{path.name}:{i}": record for i, record in enumerate(records, 1)}
    if problems := _problems(placed, known, seen):
        raise KsclError("The submission would be refused:" + "".join(f"\n  {p}" for p in problems))
    lines = (
        json.dumps(it.as_dict(), separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n"
        for it in records
    )
    write_atomically(path, "".join(lines).encode())
    if unknown:
        text = json.dumps(known, indent=1, sort_keys=True, ensure_ascii=False)
        write_atomically(results / PROTOCOLS_FILE, f"{text}\n".encode())
    return path


def check_results(results: Path) -> tuple[int, list[str]]:
    """Return how many submissions were checked, and one line for everything that is wrong."""
    if not results.is_dir():
        raise KsclError(f"{results}: There is no such folder of submissions.")
    known = known_protocols(results)
    problems = []
    for hash_, about in known.items():
        id_, definition = about.get("id"), about.get("definition")
        if not isinstance(id_, str) or not isinstance(definition, dict):
            problems.append(f"{PROTOCOLS_FILE}: {hash_}: It has no id or no definition.")
        elif Protocol(id_, definition).hash != hash_:
            problems.append(f"{PROTOCOLS_FILE}: {hash_}: The hash does not fit the definition.")
    files = submissions(results)
    names = [path.name for path in files]
    described = [f"{name.removesuffix(RECORDS_FILE)}.md" for name in names]
    allowed = {PROTOCOLS_FILE, README_FILE, *names, *described}
    seen: dict[str, str] = {}
    for path in sorted(results.iterdir()):
        if path.is_symlink() or not path.is_file():
            problems.append(f"{path.name}: It is not a regular file.")
        elif path.name not in allowed:
            problems.append(f"{path.name}: It belongs to no submission.")
        elif path.stat().st_size > MAX_BYTES:
            problems.append(f"{path.name}: It is larger than {MAX_BYTES:,} bytes.")
        elif path in files:
            found = find_records(path)
            problems += [f"{place.name}: {problem}" for place, problem in found.problems.items()]
            placed = {place.name: record for place, record in found.records.items()}
            if not placed and not found.problems:
                problems.append(f"{path.name}: There is no record in it.")
            problems += _problems(placed, known, seen)
    return len(files), [printable(problem) for problem in problems]


def submissions(results: Path) -> list[Path]:
    """Return the file of every submission."""
    return sorted(results.glob(f"*{RECORDS_FILE}"))


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


# What is submitted


def _records(paths: Sequence[str]) -> list[Record]:
    found: dict[str, Record] = {}
    for path in map(Path, paths):
        if path.is_dir() or path.name.endswith(RECORDS_FILE):
            below = find_records(path)
            for file, problem in below.problems.items():
                raise RecordError(f"{file}: {problem}")
            records = list(below.records.values())
        else:
            records = [read_record(path)]
        found |= {record.id: record for record in records}
    if not found:
        raise RecordError(f"{', '.join(paths)}: There is no record to submit.")
    return sorted(found.values(), key=lambda record: (record.created, record.id))


def _public(record: Record) -> Record:
    """Return the record without paths and names, under its new id; it keeps the one it had."""
    content = record.as_dict()
    public = {
        key: value if key in ("protocol", "code", "libraries") else without_private(value)
        for key, value in content.items()
    }
    if public != content:
        public["details"] = {**public["details"], "submitted_from": record.id}
    return parse_record({**public, "id": record_id(public)})


def without_private(value: Any) -> Any:
    """Return JSON content with shortened paths and without the names of user and host.

    A path below the working folder becomes a relative one; of another, the last part is left.
    """
    host = socket.gethostname()
    names = [host, host.partition(".")[0]]
    with contextlib.suppress(OSError, KeyError):  # a user id without a name
        names.append(getpass.getuser())
    wanted = [name for name in names if len(name) >= LEAST_LETTERS and name not in COMMON_NAMES]
    named = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in wanted) or r"(?!)")

    def public(value: Any) -> Any:
        if isinstance(value, str):
            return named.sub("…", ABSOLUTE.sub(_shortened, value))
        if isinstance(value, dict):
            return {
                public(key): inner if key == NOT_WORDS else public(inner)
                for key, inner in value.items()
            }
        return [public(inner) for inner in value] if isinstance(value, list) else value

    return public(value)


def _shortened(found: re.Match[str]) -> str:
    path = found.group()
    here = os.path.join(os.getcwd(), "")
    if path.startswith(here):
        return path[len(here) :] or "."
    return HIDDEN + re.split(r"[\\/]", path.rstrip("\\/"))[-1]


# What is refused


def _problems(
    records: Mapping[str, Record], known: Mapping[str, Json], seen: dict[str, str]
) -> list[str]:
    """Return what is wrong with the records of one submission, which are added to `seen`."""
    problems = []
    made = {made_backbone(record) for record in records.values() if record.kind == NO_EVALUATION}
    for place, record in records.items():
        of_record = [*_hostile(record), *_untraced(record, made), *_incomparable(record, known)]
        for id_ in _ids(record):
            if id_ in seen:
                of_record.append(f"It is a duplicate of {seen[id_]}.")
            seen[id_] = place
        problems += [f"{place}: {problem}" for problem in of_record]
    return problems


def _ids(record: Record) -> set[str]:
    return {record.id, str(record.details.get("submitted_from", record.id))}


def _hostile(record: Record) -> Iterator[str]:
    """Find text that a page, a terminal or a reader could take for something else."""
    for place, text in strings(record.as_dict()):
        odd = [c for c in text if unicodedata.category(c)[0] == "C" and c not in ALLOWED_CONTROLS]
        path = ABSOLUTE.search(text)
        if odd:
            yield f"{place} contains the control character U+{ord(odd[0]):04X}."
        elif MARKUP.search(text):
            yield f"{place} contains markup: {text[:60]!r}."
        elif path and place != f"details.{NOT_WORDS}":
            yield f"{place} contains the absolute path {path.group()[:60]!r}."


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


def _untraced(record: Record, made: set[str | None]) -> Iterator[str]:
    """Find what keeps a number from being traced to a seed, code, data and a backbone."""
    if record.seed < 0:
        yield "It has no seed: every number needs its value for each seed."
    if record.code.commit is None or not re.fullmatch(r"[0-9a-f]{40}", record.code.commit):
        yield "It names no commit of the code."
    if record.code.dirty is not False:
        yield "Its code differed from the commit, or nobody knows: commit, and run it again."
    if not record.data:
        yield "It has no fingerprint of its data."
    if not record.libraries.get("torch"):
        yield "It does not say which PyTorch was used."
    if not record.hardware.get("cpu"):
        yield "It does not say on what machine it was measured."
    if record.kind == NO_EVALUATION:
        if made_backbone(record) is None:
            yield "It does not say which backbone it made."
    elif not record.inputs.get("backbone"):
        yield "It does not say which backbone was evaluated."
    elif record.inputs["backbone"] not in made and not inside(record.details, "backbone", "method"):
        yield "No pretraining of the submission made its backbone, and nothing says what it is."


def _incomparable(record: Record, known: Mapping[str, Json]) -> Iterator[str]:
    if record.kind == NO_EVALUATION:
        return
    about, protocol = known.get(record.protocol.hash), record.protocol
    if about is None:
        yield f"Its protocol {protocol.id} {protocol.hash} is not in {PROTOCOLS_FILE}."
    elif (about.get("kind"), about.get("id")) != (record.kind, protocol.id):
        yield f"Its protocol hash {protocol.hash} is that of {about.get('id')}."
