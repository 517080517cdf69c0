"""Records: complete, written once, and never half-read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import statistics
import typing
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kscl.keys import PRETRAIN, load_config
from kscl.records.record import (
    LARGE,
    MAX_BYTES,
    MAX_DEPTH,
    SCHEMA,
    VERSION,
    Protocol,
    Record,
    RecordError,
    find_records,
    make_record,
    read_record,
    write_record,
)
from kscl.records.spread import mean_and_std, number_and_spread, std
from tests.helpers.commands import ROOT
from tests.helpers.leaderboard_records import INFO, linear, sha


def a_record(**changes: object) -> Record:
    fields: dict = {
        "kind": "linear",
        "task": INFO["linear"],
        "name": "moco_v2 on shapes",
        "protocol": Protocol("linear-cached", {"epochs": 100, "scorer": "top1"}),
        "metrics": {"top1": 41.5, "top5": 80},
        "seconds": 12.5,
        "seed": 3,
        "cfg": load_config(),
        "without_effect": PRETRAIN.without_effect,
        "data": {"train": {"hash": "ab", "files": 10, "bytes": 1000}},
        "inputs": {"backbone": "00ff"},
        "details": {"per_class": {"star": 40.0}},
    }
    return make_record(**(fields | changes))


def test_a_record_says_what_was_measured_and_from_what(tmp_path):
    path = write_record(a_record(), tmp_path)
    record = read_record(path)
    assert path.name == "record.json"
    assert record.metrics == {"top1": 41.5, "top5": 80}
    assert record.config.hash == PRETRAIN.hash(load_config())
    assert record.config.values["METHOD"]["NUM_SHOTS"] == 5
    assert record.inputs == {"backbone": "00ff"}
    assert record.code.source_hash
    assert record.task == INFO["linear"]
    assert record.libraries["torch"]
    assert record.hardware["cores"] >= 1


def test_a_record_is_written_once(tmp_path):
    path = write_record(a_record(), tmp_path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"record\.json"):
        write_record(a_record(seed=4), tmp_path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_protocols_with_another_definition_have_another_hash():
    assert Protocol("p", {"a": 1, "b": 2}).hash == Protocol("p", {"b": 2, "a": 1}).hash
    assert Protocol("p", {"a": 1}).hash != Protocol("p", {"a": 2}).hash


def test_the_same_protocol_on_other_data_has_another_hash():
    other = {"train": {"hash": "cd", "files": 10, "bytes": 1000}}
    assert a_record().protocol.hash == a_record(seed=9).protocol.hash
    assert a_record().protocol.hash != a_record(data=other).protocol.hash


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"metrics": {}}, "nothing was measured"),
        ({"metrics": {"top1": float("nan")}}, "finite"),
        ({"metrics": {"top1": "41"}}, "not a finite number"),
        ({"metrics": {"top1": 10**400}}, "not a finite number"),
        ({"metrics": {"top1": True}}, "not a finite number"),
        ({"task": replace(INFO["linear"], metrics=[])}, "one headline"),
        ({"task": INFO["detection"]}, "one headline that was measured"),
        ({"seed": "three"}, "seed is 'three'"),
        ({"details": {"x": object()}}, "plain finite values"),
    ],
)
def test_an_incomplete_record_is_refused_before_it_is_written(changes, reason):
    with pytest.raises(RecordError, match=reason):
        a_record(**changes)


BROKEN = {
    "changed after it was written": lambda record: record | {"metrics": {"top1": 99.9}},
    "newer release": lambda record: record | {"version": 2, "new_field": 1},
    "code is missing": lambda record: {key: record[key] for key in record if key != "code"},
    "not a record": lambda record: {"iteration": 1, "AP": 50},
    "not readable as JSON": lambda record: record | {"seconds": float("nan")},
    "protocol.hash does not fit": lambda record: (
        record | {"protocol": record["protocol"] | {"definition": {"x": 1}}}
    ),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_broken_or_foreign_file_is_reported_by_name_and_skipped(tmp_path, reason):
    good = write_record(a_record(), tmp_path / "good")
    bad = tmp_path / "bad" / "record.json"
    bad.parent.mkdir()
    bad.write_text(json.dumps(BROKEN[reason](a_record().as_dict())))
    found = find_records(tmp_path)
    assert list(found.records) == [good]
    assert list(found.problems) == [bad]
    assert reason in found.problems[bad]
    with pytest.raises(RecordError, match=re.escape(str(bad))):
        read_record(bad)


def test_other_json_files_beside_a_record_are_left_alone(tmp_path):
    write_record(a_record(), tmp_path)
    (tmp_path / "metrics.json").write_text("{}")
    found = find_records(tmp_path)
    assert len(found.records) == 1
    assert not found.problems


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(RecordError, match="nowhere"):
        find_records(tmp_path / "nowhere")


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


VALUES = [41.5, 42.0, 40.9]


def test_mean_and_std_are_those_of_a_sample():
    assert std(VALUES) == pytest.approx(statistics.stdev(VALUES))
    mean, spread = statistics.fmean(VALUES), statistics.stdev(VALUES)
    assert mean_and_std(VALUES) == f"{mean:.2f} ± {spread:.2f}"
    assert mean_and_std(VALUES, digits=1) == f"{mean:.1f} ± {spread:.1f}"


def test_a_single_value_has_no_spread():
    assert std([3.0]) is None
    assert mean_and_std([3.0]) == "3.00"
    assert number_and_spread(3.0, None) == "3.00"
    assert number_and_spread(3.0, 0.0) == "3.00 ± 0.00"
