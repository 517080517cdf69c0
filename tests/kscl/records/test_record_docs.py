"""docs/record.md describes the record as it is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import typing
from collections.abc import Iterator

from kscl.records.record import MAX_BYTES, SCHEMA, VERSION, Record
from kscl.records.shape import LARGE, MAX_DEPTH
from tests.helpers.commands import ROOT
from tests.helpers.leaderboard_records import linear, sha

TEXT = (ROOT / "docs" / "record.md").read_text(encoding="utf-8")
# What a type of the dataclass is called in the document.
WORDS = {str: "text", int: "integer", float: "number", bool: "boolean", type(None): "null"}
WORDS |= {list: "list"}


def fields_of(record: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and the type of every field, nested ones with a dot."""
    for name, hint in typing.get_type_hints(record).items():
        choices = typing.get_args(hint) if hint.__class__.__name__ == "UnionType" else (hint,)
        words = (WORDS.get(typing.get_origin(it) or it, "object") for it in choices)
        yield prefix + name, " or ".join(words)
        inner = typing.get_args(hint)[0] if typing.get_origin(hint) is list else hint
        if dataclasses.is_dataclass(inner):
            yield from fields_of(inner, f"{prefix}{name}.")


def test_every_field_is_listed_with_its_type_and_no_other():
    listed = re.findall(r"^\| `([\w.]+)` \| ([\w ]+) \|", TEXT.split("## Hashes")[0], re.MULTILINE)
    assert sorted(listed) == sorted(fields_of(Record))


def test_the_limits_are_those_of_the_code():
    for value in (SCHEMA, f"{MAX_BYTES // 2**20} MiB", f"{MAX_DEPTH} levels"):
        assert str(value) in TEXT
    assert f"version of this schema: {VERSION}" in TEXT
    assert f"{LARGE:g}".replace("+", "") in TEXT


def test_the_documented_hashes_are_those_of_a_record():
    def digest(value: object) -> str:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    content = linear(50, sha("a"))
    assert 'json.dumps(content, sort_keys=True, separators=(",", ":"))' in TEXT
    assert content["id"] == digest({key: content[key] for key in content if key != "id"})
    assert content["protocol"]["hash"] == digest(content["protocol"]["definition"])[:16]
