"""Pack records into a folder of `results/`, ready for a pull request."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from fvcore.common.config import CfgNode

from kscl.benchmark.submission.check import NO_EVALUATION, problems_of
from kscl.benchmark.submission.layout import (
    CERTIFICATES,
    CONFIGS,
    NAME,
    PROTOCOLS_FILE,
    known_protocols,
    record_name,
    stem,
)
from kscl.benchmark.submission.private import without_private
from kscl.config import config_yaml
from kscl.errors import KsclError
from kscl.records.record import (
    Record,
    RecordError,
    find_records,
    parse_record,
    read_record,
    record_id,
)
from kscl.runtime.files import whole_folder, write_atomically


def submit(paths: Sequence[str], name: str, results: Path, *, new_protocols: bool = False) -> Path:
    """Write the submission `results/NAME`, and return it; nothing is left if it is refused."""
    if not NAME.fullmatch(name):
        raise KsclError(f"--name {name}: Use letters, digits, dots, dashes and underscores.")
    folder = results / name
    if folder.exists():
        raise KsclError(f"{folder}: The submission exists. Choose another --name, or delete it.")
    records = [_public(record) for record in _records(paths)]
    known = known_protocols(results)
    evaluations = [record for record in records if record.kind != NO_EVALUATION]
    needed = {record.protocol.hash: _protocol(record) for record in evaluations}
    unknown = [hash_ for hash_ in needed if hash_ not in known]
    if unknown and not new_protocols:
        named = ", ".join(f"{needed[hash_]['id']} {hash_}" for hash_ in unknown)
        raise KsclError(
            f"No submission was made before under {named}. If these settings and data are what you "
            f"mean, write --new-protocol, which adds them to {results / PROTOCOLS_FILE}."
        )
    files = _files(records)
    known = dict(sorted((known | needed).items()))
    problems = problems_of(files, known, results)
    if problems:
        raise KsclError("The submission would be refused:" + "".join(f"\n  {p}" for p in problems))
    with whole_folder(folder) as place:
        for path, content in files.items():
            write_atomically(place / path, content)
    if unknown:
        text = json.dumps(known, indent=1, sort_keys=True, ensure_ascii=False)
        write_atomically(results / PROTOCOLS_FILE, f"{text}\n".encode())
    return folder


def _records(paths: Sequence[str]) -> list[Record]:
    found: dict[str, Record] = {}
    for path in map(Path, paths):
        if path.is_dir():
            below = find_records(path)
            for file, problem in below.problems.items():
                raise RecordError(f"{file}: {problem}")
            records = list(below.records.values())
        else:
            records = [read_record(path)]
        found |= {record.id: record for record in records}
    if not found:
        raise RecordError(f"{', '.join(paths)}: There is no record to submit.")
    return list(found.values())


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


def _files(records: Sequence[Record]) -> dict[str, bytes]:
    files = {}
    for record in records:
        text = json.dumps(record.as_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        files[record_name(record)] = f"{text}\n".encode()
        values = config_yaml(CfgNode(record.config.values))
        files[f"{CONFIGS}/{stem(record)}.yaml"] = values.encode()
        if "certificate" in record.details:
            certificate = json.dumps(record.details["certificate"], indent=1, ensure_ascii=False)
            files[f"{CERTIFICATES}/{stem(record)}.json"] = f"{certificate}\n".encode()
    return files


def _protocol(record: Record) -> dict[str, object]:
    about = dataclasses.asdict(record.protocol)
    return {"kind": record.kind, "id": about["id"], "definition": about["definition"]}
