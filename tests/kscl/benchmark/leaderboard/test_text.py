"""Text of a record is only text, in every format and under any name."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kscl.benchmark.leaderboard.exports import as_csv
from kscl.benchmark.leaderboard.page import page
from kscl.benchmark.leaderboard.rows import build_board
from kscl.benchmark.leaderboard.tables import document, text
from kscl.commands.leaderboard import main, write_board
from kscl.records.record import Json, parse_record, record_id
from tests.helpers.leaderboard_records import (
    described,
    linear,
    sha,
    write_all,
)

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)"> | a | `b` [c](d) \u202e'


def test_text_of_a_record_is_only_text_in_markdown():
    shown = text(HOSTILE)
    assert "<" not in shown
    assert not re.search(r"(?<!\\)[|`\[\]]", shown)
    assert text("two\nlines | \ud800") == r"two lines \|"


def test_a_terminal_shows_plain_names_and_markdown_escaped_ones(tmp_path, capsys):
    names = ("moco_v2", "a|b <c> & *d*", "random")
    records = [linear(50 + i, sha(n), details=described(n, 0)) for i, n in enumerate(names)]
    folder = write_all(tmp_path / "in", records)
    words = [str(folder), "--output-dir", str(tmp_path / "out"), "--no-stale-check"]
    assert main([*words, "--no-reported", "--baseline", "random"]) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if " 5" in line]
    for name in names[:2]:
        assert sum(line.startswith(f"{name} ") for line in table) == 1
        assert text(name) in (tmp_path / "out/leaderboard.md").read_text()


TRIGGERS = "=+-@＝＋－＠"


BEFORE = ("", " ", "\t", "\r", "\n", "\r\n", "x\r", "x\n", "x\u2028", "x\x85", "x\x0b")
BEFORE += ('"', 'x"', "x;", "x|", "'")


def test_no_name_starts_a_formula_in_any_cell_of_a_spreadsheet(tmp_path):
    names = [f"{before}{trigger}cmd|'/c calc'!A0" for before in BEFORE for trigger in TRIGGERS]
    records = [linear(50, sha(name), details=described(name, 0)) for name in names]
    written = as_csv(build_board([write_all(tmp_path, records)], check_stale=False))
    # As spreadsheets read it: any line end ends a row, and programs differ in what ends a cell.
    header, *rows = csv.reader(written.splitlines())
    assert len(rows) == len(names)
    assert {row[header.index("source")] for row in rows} == {"measured"}
    starts_formula = re.compile(rf"""[\s"]*[{re.escape(TRIGGERS)}]""")
    for line in written.splitlines():
        for delimiter in ",;|\t":
            assert not [cell for cell in line.split(delimiter) if starts_formula.match(cell)], line


def test_a_name_that_is_no_formula_is_left_as_it_is(tmp_path):
    folder = write_all(tmp_path, [linear(50, sha(1), details=described("moco-v2 (a, b) x+y", 0))])
    written = as_csv(build_board([folder], check_stale=False))
    assert next(csv.DictReader(io.StringIO(written)))["method"] == "moco-v2 (a, b) x+y"


def test_text_of_a_record_cannot_leave_its_place_in_the_page(tmp_path):
    records = [linear(50, sha(1), name=HOSTILE, details=described(HOSTILE, 0))]
    board = build_board([write_all(tmp_path, records)], check_stale=False)
    written = page(board, HOSTILE, tmp_path)
    assert written.count("</script>") == 2  # of the data and of the program
    assert "<img" not in written
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', written, re.S)
    assert json.loads(data.group(1))["rows"][0]["method"] == HOSTILE


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


KNOWN = ("backbone", "outputs", "curves", "per_class", "classes", "n", "confidence_interval")
KNOWN += ("files", "basis_figure", "certificate", "epoch", "loss", "method", "seed", "rho", "top1")


odd_details = st.dictionaries(
    st.sampled_from(KNOWN),
    json_values | st.dictionaries(st.sampled_from(KNOWN), json_values, max_size=3),
    max_size=6,
)


@pytest.fixture(scope="module")
def base_record() -> Json:
    return linear(50, sha("a"))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(details=odd_details, values=json_values, prints=json_values, linked=st.booleans())
def test_whatever_a_valid_record_holds_the_board_is_made(
    tmp_path_factory, base_record, details, values, prints, linked
):
    made = base_record | {
        "kind": "pretrain" if linked else "linear",
        "details": details,
        "config": {"hash": "h", "values": {"METHOD": values, "SOLVER": prints, "LABEL": values}},
        "data": {"train": {"hash": "x", "files": prints, "path": values, "parts": values}},
        "hardware": {"gpus": values, "cpu": prints, "cores": values},
        "code": {"version": "", "commit": None, "dirty": None, "modules": [], "source_hash": "x"},
        "inputs": {"backbone": str(values)},
    }
    for record in (made, base_record):
        record["id"] = record_id(record)
        parse_record(record)
    folder = write_all(tmp_path_factory.mktemp("odd"), [made, base_record])
    board = build_board([folder])
    for path in write_board(board, folder / "board").values():
        assert path.stat().st_size
    assert document(board, {"linear": ""})
