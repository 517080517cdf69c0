"""Submissions: packed without paths and names, refused with every reason, and read as a board."""

from __future__ import annotations

import getpass
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kscl.benchmark.leaderboard.rows import build_board
from kscl.benchmark.submission import MAX_BYTES, check_results, submit, without_private
from kscl.commands import check_submission
from kscl.commands import submit as submit_command
from kscl.errors import KsclError
from kscl.records.record import Protocol, find_records, read_record, record_id
from tests.helpers.leaderboard_records import (
    DATA,
    backbone_of,
    detection,
    kscl,
    linear,
    pretraining,
    write_all,
)

ROOT = Path(__file__).parents[3]
CODE = {"version": "1", "commit": "a" * 40, "dirty": False, "modules": [], "source_hash": "b" * 16}


def changed(record: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the record as if it had been written with other fields."""
    content = {**record, **fields}
    return {**content, "id": record_id(content)}


def runs(seed: int = 0) -> list[dict[str, Any]]:
    path = "/home/alice/data/photos"
    data = {"train": {**DATA["train"], "path": path}}
    made = pretraining(*kscl(5, 0.4), "OUTPUT_DIR", "/home/alice/out/kscl", seed=seed, data=data)
    bits = {"right": "/////w==", "n": 32}  # all right, and no path
    probe = linear(50 + seed, backbone_of(made), details=bits)
    found = [made, probe, detection(30, backbone_of(made))]
    return [changed(record, code=CODE) for record in found]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = write_all(tmp_path / "output", [*runs(0), *runs(1)])
    submit([str(folder)], "first", tmp_path / "results", new_protocols=True)
    return tmp_path / "results"


def test_a_submission_is_a_board_without_a_trace_of_its_maker(tmp_path, results):
    assert check_results(results) == (1, [])
    before = build_board([tmp_path / "output"], check_stale=False)
    after = build_board([results], check_stale=False)
    (row,), (then,) = after.rows, before.rows
    assert not after.problems
    assert row.entry == then.entry
    for protocol, result in then.results.items():
        assert row.results[protocol].measures == result.measures
    text = "".join(path.read_text() for path in results.rglob("*.*") if path.is_file())
    assert "alice" not in text
    assert str(tmp_path) not in text
    assert "…/photos" in text
    assert len((results / "first.records.jsonl").read_text().splitlines()) == 6


def test_names_and_paths_are_taken_out_of_any_text(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(socket, "gethostname", lambda: "blackbox.lab")
    here = os.getcwd()
    content = {
        "a": f"{here}/datasets/x",
        "b": ["voc:/data/VOC2007:trainval", "see https://example.org/a/b", "1/2 and 3 / 4"],
        "right": "/9j/4AAQ",
        "c": "log of alice on blackbox.lab: alicex C:\\Users\\bob\\run ~/x/y",
    }
    assert without_private(content) == {
        "a": "datasets/x",
        "b": ["voc:…/VOC2007:trainval", "see https://example.org/a/b", "1/2 and 3 / 4"],
        "right": "/9j/4AAQ",
        "c": "log of … on …: alicex …/run …/y",
    }


def rewrite(results: Path, **fields: Any) -> None:
    """Put a changed record in the place of the first probe's."""
    path = results / "first.records.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    place = next(i for i, record in enumerate(records) if record["kind"] == "linear")
    details = {**records[place]["details"], **fields.pop("details", {})}
    records[place] = changed(records[place], details=details, **fields)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


OTHER_PROTOCOL = vars(Protocol("linear-cached", {"epochs": 7}))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"version": 99}, "newer release"),
        ({"protocol": OTHER_PROTOCOL}, "is not in protocols.json"),
        ({"seed": -1}, "no seed"),
        ({"code": {**CODE, "commit": None}}, "commit"),
        ({"code": {**CODE, "dirty": True}}, "differed from the commit"),
        ({"inputs": {}}, "which backbone was evaluated"),
        ({"inputs": {"backbone": "c" * 64}}, "No pretraining of the submission"),
        ({"data": {}}, "fingerprint"),
        ({"name": "<script>alert(1)</script>"}, "markup"),
        ({"name": "abc\u202edcba"}, "U+202E"),
        ({"details": {"note": "made in /home/alice/x"}}, "absolute path"),
    ],
)
def test_a_record_that_cannot_be_trusted_is_refused(results, fields, said, capsys):
    rewrite(results, **fields)
    assert check_submission.main(["--results", str(results)]) == 1
    shown = capsys.readouterr().out
    assert said in shown
    assert "first.records.jsonl:" in shown


def test_a_changed_number_and_foreign_files_are_refused(results):
    path = results / "first.records.jsonl"
    path.write_text(path.read_text().replace('"top1":5', '"top1":9', 1))
    (results / "first.md").write_text("What it is.")
    (results / "run.py").write_text("")
    (results / "link.records.jsonl").symlink_to("/etc/passwd")
    (results / "folder").mkdir()
    (results / "large.records.jsonl").write_bytes(b" " * (MAX_BYTES + 1))
    (results / "empty.records.jsonl").write_text("")
    problems = check_results(results)[1]
    assert sorted(problem.split(":")[0] for problem in problems) == [
        "empty.records.jsonl",
        "first.records.jsonl",
        "folder",
        "large.records.jsonl",
        "link.records.jsonl",
        "run.py",
    ]
    assert any("fit its id" in problem for problem in problems)


def test_a_record_of_a_submission_is_named_by_its_line(results):
    path = results / "first.records.jsonl"
    found = find_records(path).records
    assert [read_record(place).id for place in found] == [record.id for record in found.values()]
    for line in (0, 99):
        with pytest.raises(KsclError, match=f"records.jsonl:{line}: There is no such line"):
            read_record(f"{path}:{line}")


def test_what_was_submitted_before_is_refused(tmp_path, results):
    for path in ("output/run_0001", "results/first.records.jsonl"):
        with pytest.raises(KsclError, match="duplicate"):
            submit([str(tmp_path / path)], "again", results)
    assert not (results / "again.records.jsonl").exists()


def test_a_new_protocol_needs_a_word(tmp_path, capsys):
    folder = write_all(tmp_path / "output", runs())
    given = [str(folder), "--name", "x", "--results", str(tmp_path / "results")]
    assert submit_command.main(given) == 2
    assert "--new-protocol" in capsys.readouterr().err
    assert submit_command.main([*given, "--new-protocol"]) == 0
    assert len(find_records(tmp_path / "results").records) == 3


def test_uncommitted_code_cannot_be_submitted(tmp_path):
    records = [changed(record, code={**CODE, "dirty": True}) for record in runs()]
    folder = write_all(tmp_path / "output", records)
    with pytest.raises(KsclError, match="differed from the commit"):
        submit([str(folder)], "x", tmp_path / "results", new_protocols=True)
    assert not (tmp_path / "results").exists()


def test_the_submissions_of_this_repository_can_be_accepted():
    assert check_results(ROOT / "results")[1] == []
