"""Files called record.json that are not records: one line that names the file and the reason."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kscl.benchmark.leaderboard.rows import build_board
from kscl.benchmark.leaderboard.tables import document
from kscl.commands.leaderboard import main, write_board
from kscl.records.record import (
    MAX_BYTES,
    Protocol,
    Record,
    RecordError,
    find_records,
    parse_record,
    read_record,
    record_id,
)
from tests.helpers.json_values import paths_in, replaced
from tests.helpers.leaderboard_records import kscl, linear, pretraining, sha, write_all

GOOD = linear(50, sha("a"), details={"n": 100, "backbone": {"method": "a", "seed": 0}})


def nested(depth: int) -> list:
    content: list = []
    for _ in range(depth):
        content = [content]
    return content


def signed(content: dict) -> dict:
    """Return content whose id fits it, so that nothing but the change itself is wrong."""
    return {**content, "id": record_id(content)}


def text_of(content: object) -> bytes:
    return json.dumps(content).encode()


def edited(**changes: object) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"hello",
    "binary": bytes(range(256)) * 16,
    "UTF-16": json.dumps(GOOD).encode("utf-16"),
    "with a byte order mark": b"\xef\xbb\xbf" + text_of(GOOD),
    "cut off": text_of(GOOD)[:300],
    "two records": text_of(GOOD) * 2,
    "null": b"null",
    "a list": b"[]",
    "a number": b"1",
    "text": b'"record"',
    "NaN": edited(seconds=float("nan")),
    "infinity": edited(seconds=float("-inf")),
    "overflow": edited(seconds=1).replace(b'"seconds": 1,', b'"seconds": 1e999,'),
    "an integer of 400 digits": text_of(signed({**GOOD, "seconds": 10**400})),
    "an integer of 5,000 digits": edited(seed=7).replace(b'"seed": 7', b'"seed": ' + 5000 * b"7"),
    "nested 100,000 deep": b"[" * 100_000 + b"]" * 100_000,
    "nested 900 deep": text_of(GOOD).replace(b'"n": 100', b'"n": ' + b"[" * 900 + b"]" * 900),
    "nested 100 deep": text_of(signed({**GOOD, "details": {"n": nested(100)}})),
    "thousands of keys": text_of(signed({**GOOD, **{f"key {i}\n": i for i in range(5000)}})),
    "thousands of wrong metrics": edited(metrics={f"m{i}\r": "x" * 1000 for i in range(5000)}),
    "a long wrong value": edited(seed="s" * 1_000_000),
    "lines in a wrong value": edited(kind="a\nb\r\u2028\x1b[31m\ud800"),
    "no field at all": b'{"schema": "kscl-record", "version": 1}',
    "a version that is text": edited(version="1"),
    "a version that is true": edited(version=True),
    "a version of long ago": edited(version=0),
    "a newer version": edited(version=10**400),
    "a time that is none": text_of(signed({**GOOD, "created": "yesterday"})),
    "a time without its zone": text_of(signed({**GOOD, "created": "2026-01-01T00:00:00"})),
    "a metric beyond computing": text_of(signed({**GOOD, "metrics": {"top1": 1e300}})),
    "a seed beyond 64 bits": text_of(signed({**GOOD, "seed": 2**63})),
    "data without a hash": text_of(signed({**GOOD, "data": {"train\n": {"files": 1}}})),
}  # fmt: skip


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def too_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)  # takes no room on disk


def unreadable(path: Path) -> None:
    if os.geteuid() == 0:  # whom no permission stops, but the system's own file does
        path.symlink_to("/proc/self/mem")
    else:
        path.write_bytes(text_of(GOOD))
        path.chmod(0)


PLACES: dict[str, Callable[[Path], None]] = {
    "a folder": Path.mkdir,
    "a dangling link": link_to("nowhere"),
    "a link to itself": link_to("record.json"),
    "a pipe": os.mkfifo,
    "an endless device": link_to("/dev/zero"),
    "too large": too_large,
    "unreadable": unreadable,
}


def put(name: str, path: Path) -> None:
    if name in PLACES:
        PLACES[name](path)
    else:
        path.write_bytes(CONTENTS[name])


def test_a_file_that_is_no_record_is_one_line_that_names_it(tmp_path, capsys):
    write_all(tmp_path, [GOOD])
    bad = {name: tmp_path / f"bad {name}" / "record.json" for name in (*PLACES, *CONTENTS)}
    for name, path in bad.items():
        path.parent.mkdir()
        put(name, path)
    found = find_records(tmp_path)
    assert sorted(found.problems) == sorted(bad.values())
    for path, problem in found.problems.items():
        with pytest.raises(RecordError) as error:
            read_record(path)
        assert str(error.value) == f"{path}: {problem}"
        assert problem.isprintable()  # one line, no control character
        assert len(problem) < 2000
    assert main([str(tmp_path), "--output-dir", str(tmp_path / "board")]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(bad)
    for line, path in zip(lines, sorted(bad.values()), strict=True):
        assert line.startswith(f"Not counted: {path.relative_to(tmp_path)}: It")
    assert main([str(bad["empty"].parent), "--output-dir", str(tmp_path / "board")]) == 2
    assert "bad" in capsys.readouterr().err


def test_a_folder_name_of_two_lines_is_told_in_one(tmp_path):
    write_all(tmp_path, [GOOD])
    bad = tmp_path / "two\nlines\udcff" / "record.json"
    bad.parent.mkdir()
    bad.write_text("{}")
    (problem,) = build_board([tmp_path]).problems
    assert problem.startswith(r"two\nlines\udcff/record.json: ")


ODD = [None, True, -1, 0.5, 1e300, 10**400, "", "text\r\n", "\ud800", [], [[1]], {}, {"": {"x": 1}}]


def refitted(content: dict) -> dict:
    """Return content with all hashes made to fit, as far as they can be made."""
    protocol = content.get("protocol")
    if isinstance(protocol, dict) and isinstance(protocol.get("definition"), dict):
        protocol["hash"] = Protocol("", protocol["definition"]).hash
    return signed(content)


def refusal(read: Callable[[], Record]) -> str:
    try:
        read()
    except RecordError as error:
        return str(error)
    return ""


@pytest.mark.full
@pytest.mark.parametrize("kind", ["pretrain", "linear"])
def test_an_odd_value_anywhere_is_refused_in_one_line_or_the_board_is_made(tmp_path, kind):
    good = pretraining(*kscl(5, 0.4)) if kind == "pretrain" else GOOD
    good["details"].pop("curves", None)
    # Those of the many settings that the board looks at.
    values: dict = {"LABEL": "x", "SOLVER": {"EPOCHS": 2}, "BACKBONE": {"NAME": "r"}}
    values["METHOD"] = {"NUM_SHOTS": 5, "RHO": 0.4, "SIMILARITY": "projection", "SYMMETRIC": False}
    values["METHOD"]["GRAD_THROUGH_KEYS"] = False
    good = {**good, "config": {"hash": "x", "values": values}}
    taken: list[dict] = []
    refused = 0
    for way in paths_in(good):
        for value in ODD:
            content = refitted(replaced(good, way, value))
            reason = refusal(lambda content=content: parse_record(content))
            assert reason.isprintable()
            if reason:
                refused += 1
            else:
                taken.append(content)
    assert refused > 200
    assert len(taken) > 200
    board = build_board([write_all(tmp_path, taken)])
    assert board.records > 150  # some changes change nothing
    for path in write_board(board, tmp_path / "board").values():
        assert path.stat().st_size
    assert document(board, {"x": ""})


@pytest.mark.full
def test_a_record_with_any_byte_changed_is_refused_or_says_the_same(tmp_path):
    chance = random.Random(0)
    good, path = text_of(GOOD), tmp_path / "record.json"
    refused = 0
    for _ in range(500):
        content = bytearray(good)
        content[chance.randrange(len(content))] = chance.randrange(256)
        path.write_bytes(content)
        reason = refusal(lambda: read_record(path))
        assert reason.isprintable()
        if reason:
            refused += 1
        else:
            assert read_record(path).as_dict() == GOOD
    assert refused > 400
