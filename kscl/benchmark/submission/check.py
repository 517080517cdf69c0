"""Refuse a submission that cannot be trusted, read or traced, with every reason at once."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import yaml

from kscl.benchmark.leaderboard.details import inside
from kscl.benchmark.leaderboard.linking import made_backbone
from kscl.benchmark.submission.layout import (
    CERTIFICATES,
    CONFIGS,
    PROTOCOLS_FILE,
    README_FILE,
    known_protocols,
    record_name,
    stem,
    strings,
    submissions,
)
from kscl.benchmark.submission.private import absolute_path
from kscl.errors import KsclError, printable
from kscl.records.record import RECORD_FILE, Json, Protocol, Record, RecordError, parse_record

MAX_BYTES = 4 * 2**20  # of one file
MARKUP = re.compile(r"<\s*[A-Za-z/!?]|&#|javascript:|\bdata:text", re.IGNORECASE)
MAY_HAVE_SLASHES = ("details.right",)  # base64
ALLOWED_CONTROLS = "\n\t"
NO_EVALUATION = "pretrain"  # has costs, which are shown and never ranked


def check_results(results: Path) -> tuple[int, list[str]]:
    """Return how many submissions were checked, and one line for everything that is wrong."""
    if not results.is_dir():
        raise KsclError(f"{results}: There is no such folder of submissions.")
    known = known_protocols(results)
    problems = [
        f"{PROTOCOLS_FILE}: {hash_}: {problem}"
        for hash_, about in known.items()
        for problem in _protocol_problems(hash_, about)
    ]
    seen: dict[str, str] = {}
    folders = submissions(results)
    for folder in folders:
        files, odd = _read(folder)
        problems += [f"{folder.name}/{problem}" for problem in odd]
        for problem in problems_of(files, known, results, seen, folder.name):
            problems.append(f"{folder.name}/{problem}")
    return len(folders), [printable(problem) for problem in problems]


def problems_of(
    files: Mapping[str, bytes],
    known: Mapping[str, Json],
    results: Path,
    seen: dict[str, str] | None = None,
    name: str = "",
) -> list[str]:
    """Return what is wrong with the files of one submission.

    `seen` maps the ids of records of other submissions to where they are; without it, those of
    `results` are read.
    """
    if seen is None:
        seen = _ids_in(results)
    problems: list[str] = []
    records: dict[str, Record] = {}
    for path, content in files.items():
        if path.endswith(RECORD_FILE):
            try:
                records[path] = parse_record(json.loads(content))
            except (RecordError, ValueError, RecursionError) as error:
                problems.append(f"{path}: {error}")
    if not records and not problems:
        problems.append("*: There is no record in it.")
    wanted = {README_FILE}
    made = {made_backbone(record) for record in records.values() if record.kind == NO_EVALUATION}
    for path, record in records.items():
        wanted |= {path, *_companions(record)}
        of_record = [
            *_naming(path, record),
            *_hostile(record),
            *_traced(record, made),
            *_comparable(record, known),
            *_config(record, files),
        ]
        for id_ in {record.id, str(record.details.get("submitted_from", record.id))}:
            if id_ in seen:
                of_record.append(f"It is a duplicate of {seen[id_]}.")
            seen[id_] = f"{name}/{path}" if name else path
        problems += [f"{path}: {problem}" for problem in of_record]
    problems += [f"{path}: It belongs to no record." for path in files if path not in wanted]
    return problems


def _read(folder: Path) -> tuple[dict[str, bytes], list[str]]:
    files, problems = {}, []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            problems.append(f"{name}: It is not a regular file.")
        elif path.is_file() and path.stat().st_size > MAX_BYTES:
            problems.append(f"{name}: It is larger than {MAX_BYTES:,} bytes.")
        elif path.is_file():
            files[name] = path.read_bytes()
    return files, problems


def _ids_in(results: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for folder in submissions(results) if results.is_dir() else []:
        for path in folder.glob(f"*.{RECORD_FILE}"):
            try:
                record = parse_record(json.loads(path.read_bytes()))
            except (RecordError, ValueError, OSError, RecursionError):
                continue  # its own check names it
            for id_ in (record.id, str(record.details.get("submitted_from", record.id))):
                found[id_] = f"{folder.name}/{path.name}"
    return found


def _companions(record: Record) -> list[str]:
    return [f"{CONFIGS}/{stem(record)}.yaml", f"{CERTIFICATES}/{stem(record)}.json"]


def _naming(path: str, record: Record) -> Iterator[str]:
    if path != record_name(record):
        yield f"It must be called {record_name(record)}."


def _hostile(record: Record) -> Iterator[str]:
    """Find text that a page, a terminal or a reader could take for something else."""
    for place, text in strings(record.as_dict()):
        odd = [c for c in text if unicodedata.category(c)[0] == "C" and c not in ALLOWED_CONTROLS]
        if odd:
            yield f"{place} contains the control character U+{ord(odd[0]):04X}."
        elif MARKUP.search(text):
            yield f"{place} contains markup: {text[:60]!r}."
        else:
            path = absolute_path(text)
            if path is not None and place not in MAY_HAVE_SLASHES:
                yield f"{place} contains the absolute path {path[:60]!r}."


def _traced(record: Record, made: Set[str | None]) -> Iterator[str]:
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


def _comparable(record: Record, known: Mapping[str, Json]) -> Iterator[str]:
    if record.kind == NO_EVALUATION:
        return
    about = known.get(record.protocol.hash)
    if about is None:
        yield (
            f"Its protocol {record.protocol.id} {record.protocol.hash} is not in {PROTOCOLS_FILE}."
        )
    elif (about.get("kind"), about.get("id")) != (record.kind, record.protocol.id):
        yield f"Its protocol hash {record.protocol.hash} is that of {about.get('id')}."


def _protocol_problems(hash_: str, about: Json) -> Iterator[str]:
    definition = about.get("definition")
    if not isinstance(definition, dict) or not isinstance(about.get("id"), str):
        yield "It has no id or no definition."
    elif Protocol(about["id"], definition).hash != hash_:
        yield "The hash does not fit the definition."


def _config(record: Record, files: Mapping[str, bytes]) -> Iterator[str]:
    path = f"{CONFIGS}/{stem(record)}.yaml"
    try:
        values = yaml.safe_load(files[path])
    except KeyError:
        yield f"Its config {path} is missing."
        return
    except (yaml.YAMLError, UnicodeDecodeError):
        yield f"Its config {path} is not YAML."
        return
    if values != record.config.values:
        yield f"Its config {path} has other values than the record."
    certificate = files.get(f"{CERTIFICATES}/{stem(record)}.json")
    if "certificate" in record.details:
        try:
            same = json.loads(certificate or b"null") == record.details["certificate"]
        except (ValueError, RecursionError):
            same = False
        if not same:
            yield "Its certificate is missing, or another one."
