"""What a suite keeps about finished stages: damaged notes are named, and nothing is lost."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from kscl.benchmark.suite.execute import DONE, FAILED, TO_DO, look, run_stages
from kscl.benchmark.suite.progress import to_go
from kscl.benchmark.suite.stages import Stage
from kscl.errors import KsclError
from tests.helpers.faults.full_disk import small_files


def stages_in(folder: Path) -> list[Stage]:
    """Two stages, the second of which needs the first, that only make their folders."""
    first = Stage(
        "a/one", "pretrain", "mkdir", ("-p", f"{folder}/one"), (), "1" * 64, f"{folder}/one"
    )
    second = Stage(
        "a/two", "knn", "mkdir", ("-p", f"{folder}/two"), (first,), "2" * 64, f"{folder}/two"
    )
    return [first, second]


def run(folder: Path) -> list[str]:
    """Run what is not done; return the states before."""
    states = look(stages_in(folder), folder / ".stages")
    before = [state.status for state in states]
    assert run_stages(states, folder / ".stages", lambda states: None) == 0
    return before


def note_of(folder: Path, name: str) -> Path:
    (path,) = (folder / ".stages").glob(f"a_{name}-*.json")
    return path


@pytest.fixture(autouse=True)
def _heard(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("kscl"), "propagate", True)
    caplog.set_level(logging.WARNING)


DAMAGED = {
    "empty": b"",
    "not JSON": b"{",
    "binary": bytes(range(256)),
    "another type": b"[]",
    "text": b'"done"',
    "no key": b'{"kind": "pretrain", "seconds": 1.0}',
    "a key that is a number": b'{"key": 1, "kind": "pretrain", "seconds": 1.0}',
    "no time": b'{"key": "1", "kind": "pretrain"}',
    "a time that is text": b'{"key": "1", "kind": "pretrain", "seconds": "1"}',
    "not a number": b'{"key": "1", "kind": "pretrain", "seconds": NaN}',
    "beyond all numbers": b'{"key": "1", "kind": "pretrain", "seconds": 1e999}',
    "a negative time": b'{"key": "1", "kind": "pretrain", "seconds": -1}',
    "an unknown field": b'{"key": "1", "kind": "pretrain", "seconds": 1, "x": 1}',
    "nested deep": b"[" * 100_000,
}


def test_the_suites_estimates_are_shown_until_a_stage_of_the_kind_has_finished(tmp_path):
    states = look(stages_in(tmp_path), tmp_path / ".stages", {"pretrain": 600, "knn": 60.0})
    shown = []
    run_stages(states, tmp_path / ".stages", lambda states: shown.append(to_go(states)))
    assert shown[0] == "About 11:00 to go; 0 of 2 stages done"
    assert any(line == "About 1:00 to go; 1 of 2 stages done" for line in shown)
    assert all(state.expected < 60 for state in states)  # as measured
    (first, _) = look(stages_in(tmp_path), tmp_path / ".stages", {"pretrain": 600})
    assert first.expected < 60


def test_what_was_made_from_a_result_that_is_gone_is_run_again(tmp_path):
    run(tmp_path)
    (tmp_path / "one").rmdir()
    assert run(tmp_path) == [TO_DO, TO_DO]
    (tmp_path / "two").rmdir()
    assert run(tmp_path) == [DONE, TO_DO]


def test_a_longer_pretraining_is_expected_to_take_longer_by_its_length(tmp_path):
    def stage(name: str, length: int) -> Stage:
        folder = f"{tmp_path}/{name}"
        return Stage(f"a/{name}", "pretrain", "mkdir", (folder,), (), name * 64, folder, length)

    (tmp_path / "8").mkdir()
    note = {"key": "8" * 64, "kind": "pretrain", "seconds": 400.0}
    folder = tmp_path / ".stages"
    folder.mkdir()
    (folder / "a_8-88888888.json").write_text(json.dumps(note))
    states = look([stage("8", 8), stage("4", 4), stage("1", 1)], folder)
    assert [state.expected for state in states] == [400.0, 200.0, 50.0]
    assert to_go(states) == "About 4:10 to go; 1 of 3 stages done"
    estimated = look([stage("2", 2), stage("1", 1)], tmp_path / "empty", {"pretrain": 60.0})
    assert [state.expected for state in estimated] == [120.0, 60.0]


def test_what_is_done_is_not_run_again(tmp_path):
    assert run(tmp_path) == [TO_DO, TO_DO]
    assert run(tmp_path) == [DONE, DONE]


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_stage_whose_note_is_damaged_is_looked_at_again_and_the_note_named(
    tmp_path, caplog, content
):
    run(tmp_path)
    note = note_of(tmp_path, "one")
    note.write_bytes(content)
    assert run(tmp_path) == [TO_DO, DONE]
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"{note}: ")
    assert message.isprintable()
    assert run(tmp_path) == [DONE, DONE]
    assert len(caplog.records) == 1


def test_a_damaged_note_of_a_stage_that_the_suite_no_longer_has_is_named_and_left(tmp_path, caplog):
    run(tmp_path)
    other = tmp_path / ".stages" / "b_gone-12345678.json"
    other.write_bytes(b"\0")
    assert run(tmp_path) == [DONE, DONE]
    assert str(other) in caplog.text
    assert other.read_bytes() == b"\0"


def test_a_note_of_other_settings_is_not_taken_for_this_stage(tmp_path, caplog):
    run(tmp_path)
    note = note_of(tmp_path, "one")
    note.write_text(json.dumps({**json.loads(note.read_text()), "key": "0" * 64}))
    assert run(tmp_path) == [TO_DO, DONE]
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("a/one is run again")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_something_else_where_a_note_belongs_stops_the_suite_before_it_starts(tmp_path, make):
    run(tmp_path)
    note = note_of(tmp_path, "one")
    note.unlink()
    make(note)
    with pytest.raises(KsclError, match="Delete it") as error:
        look(stages_in(tmp_path), tmp_path / ".stages")
    assert str(note) in str(error.value)


def test_a_file_where_the_folder_of_notes_belongs_is_named(tmp_path):
    (tmp_path / ".stages").write_text("")
    states = look(stages_in(tmp_path), tmp_path / ".stages")
    with pytest.raises(KsclError) as error:
        run_stages(states, tmp_path / ".stages", lambda states: None)
    assert str(tmp_path / ".stages") in str(error.value)


@pytest.mark.parametrize(("limit", "file"), [(0, ".log"), (80, ".json")])
def test_a_full_disk_is_told_with_the_file_and_the_suite_goes_on_afterwards(tmp_path, limit, file):
    folder = tmp_path / "s"
    states = look(stages_in(folder), folder / ".stages")
    program = f"$ mkdir -p {folder}/one\n"
    limit = limit and len(program)  # the log of the first stage fits, its note does not
    with small_files(limit), pytest.raises(KsclError) as error:
        run_stages(states, folder / ".stages", lambda states: None)
    assert f"a_one-{'1' * 8}{file}" in str(error.value)
    assert str(error.value).isprintable()
    assert not list((folder / ".stages").glob("*.json"))
    assert run(folder) == [TO_DO, TO_DO]
    assert run(folder) == [DONE, DONE]


def test_a_stage_that_fails_has_no_note(tmp_path):
    stage = Stage("a/one", "pretrain", "false", (), (), "1" * 64, str(tmp_path))
    states = look([stage], tmp_path / ".stages")
    assert run_stages(states, tmp_path / ".stages", lambda states: None) == 1
    assert states[0].status == FAILED
    assert not list((tmp_path / ".stages").glob("*.json"))
