"""Which records become a board: copies, broken files, several folders, and stale rows."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest

from kscl.benchmark.leaderboard.rows import build_board
from kscl.commands.leaderboard import write_board
from kscl.records.fingerprint import fingerprint
from kscl.records.record import RecordError
from tests.helpers.leaderboard_records import (
    a_whole_board,
    backbone_of,
    board_of,
    detection,
    kscl,
    linear,
    only,
    pretraining,
    runs,
    write_all,
)


def test_a_copied_record_counts_once_and_is_told(tmp_path):
    folder = write_all(tmp_path, runs(kscl(5, 0.4), 68, seeds=1))
    shutil.copytree(folder / "run_0001", folder / "zz_copy")
    board = build_board([folder], check_stale=False)
    assert board.records == 4
    assert board.problems == [
        "zz_copy/record.json: It is the same record as run_0001/record.json, which is counted once."
    ]


def test_broken_and_future_records_are_told_by_name(tmp_path):
    records = runs(kscl(5, 0.4), 68, seeds=1)
    folder = write_all(tmp_path, records)
    (folder / "run_0001" / "record.json").write_text("{")
    newer = records[2] | {"version": 2}
    (folder / "run_0002" / "record.json").write_text(json.dumps(newer))
    board = build_board([folder], check_stale=False)
    assert board.records == 2
    broken, future = board.problems
    assert broken.startswith("run_0001/record.json: It is not readable as JSON")
    assert future.startswith("run_0002/record.json: It was written by a newer release")


def test_a_folder_without_a_record_is_an_error_that_lists_what_was_found(tmp_path):
    (tmp_path / "record.json").write_text("[]")
    with pytest.raises(
        RecordError, match=r"There is no record to make a leaderboard of.\n  record\.json"
    ):
        build_board([tmp_path])


def test_folders_of_two_machines_give_one_board(tmp_path):
    records = a_whole_board()
    whole = board_of(tmp_path / "whole", records)
    write_all(tmp_path / "one", records[::2])
    write_all(tmp_path / "two", records[1::2] + records[:3])
    merged = build_board([tmp_path / "one", tmp_path / "two"], check_stale=False)
    assert len(merged.problems) == 3
    shown = [[(row.entry, row.results.keys()) for row in board.rows] for board in (whole, merged)]
    assert shown[0] == shown[1]
    for row, same in zip(whole.rows, merged.rows, strict=True):
        for protocol, result in row.results.items():
            assert result.measures == same.results[protocol].measures


def test_a_folder_given_twice_or_inside_another_is_read_once(tmp_path):
    folder = write_all(tmp_path, runs(kscl(5, 0.4), 68, seeds=1))
    board = build_board([folder, folder / "run_0000", folder], check_stale=False)
    assert (board.records, board.problems) == (4, [])


def test_the_same_records_give_the_same_bytes(tmp_path):
    folder = write_all(tmp_path / "records", a_whole_board())
    first = write_board(build_board([folder]), tmp_path / "board")
    before = {name: path.read_bytes() for name, path in first.items()}
    again = write_board(build_board([folder]), tmp_path / "board")
    assert before == {name: path.read_bytes() for name, path in again.items()}


def test_a_row_is_stale_when_its_backbone_file_changed(tmp_path):
    content = b"weights"
    outputs = {"outputs": {"backbone": hashlib.sha256(content).hexdigest()}}
    folder = write_all(tmp_path, [pretraining(details=outputs)])
    assert only(build_board([folder]).rows).stale == []  # nothing there says nothing
    file = folder / "run_0000" / "backbone.safetensors"
    file.write_bytes(content)
    assert only(build_board([folder]).rows).stale == []
    file.write_bytes(b"other weights")
    (reason,) = only(build_board([folder]).rows).stale
    assert "backbone file" in reason


def test_a_row_is_stale_when_its_data_changed(tmp_path):
    data = tmp_path / "images"
    data.mkdir()
    (data / "a.png").write_bytes(b"a")
    recorded = {"train": fingerprint(data).as_dict() | {"path": str(data)}}
    made = pretraining(data=recorded)
    folder = write_all(tmp_path / "records", [made, linear(60, backbone_of(made))])
    assert only(build_board([folder]).rows).stale == []
    (data / "b.png").write_bytes(b"b")
    (reason,) = only(build_board([folder]).rows).stale
    assert "train data" in reason
    shutil.rmtree(data)
    assert only(build_board([folder]).rows).stale == []


def test_a_row_is_stale_when_the_code_changed(tmp_path, monkeypatch):
    made = pretraining()
    detected = detection(50, backbone_of(made))
    folder = write_all(tmp_path, [made, detected])
    assert only(build_board([folder]).rows).stale == []
    monkeypatch.setattr(
        "kscl.benchmark.leaderboard.rows.source_hash", lambda modules: "0123456789abcdef"
    )
    then = (record["code"]["source_hash"] for record in (made, detected))
    expected = {f"The code was {code} and is 0123456789abcdef." for code in then}
    assert set(only(build_board([folder]).rows).stale) == expected


def test_links_that_lead_in_a_circle_do_not_stop_the_board(tmp_path):
    folder = write_all(tmp_path, [pretraining(details={"basis_figure": "loop.png"})])
    (folder / "run_0000" / "loop.png").symlink_to("loop.png")
    (folder / "around").symlink_to(".")
    board = build_board([folder], check_stale=False)
    assert board.records == 1
    write_board(board, tmp_path / "board")
