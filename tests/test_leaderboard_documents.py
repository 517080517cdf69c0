"""Tables for documents: the differences to a named row, and a board put between two marks."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from kscl.errors import KsclError
from kscl.leaderboard.cli import main
from kscl.leaderboard.differences import differences
from kscl.leaderboard.insert import insert
from kscl.leaderboard.rows import build_board
from kscl.leaderboard.statistics import welch_interval
from tests.leaderboard_records import described, linear, runs, sha, write_all

scores = st.floats(0, 100).map(lambda value: round(value, 1))
replicates = st.lists(scores, min_size=2, max_size=6).filter(lambda values: np.ptp(values) > 0)

DOCUMENT = "before\n<!-- board one -->\noutdated\n<!-- end of board one -->\nafter\n"


@given(replicates, replicates)
def test_the_interval_of_a_difference_is_welchs(one, other):
    expected = scipy.stats.ttest_ind(one, other, equal_var=False).confidence_interval(0.95)
    assert welch_interval(one, other) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_one_seed_has_no_interval_and_no_spread_has_a_point():
    assert welch_interval([1.0], [2.0, 3.0]) is None
    assert welch_interval([3.0, 3.0], [1.0, 1.0]) == (2.0, 2.0)


def levels(method, values):
    return [
        linear(value, sha(method, seed), details=described(method, seed))
        for seed, value in enumerate(values)
    ]


@pytest.fixture
def records(tmp_path):
    made = [*levels("moco", [60, 62, 64]), *levels("kscl", [61, 63.1, 64.9]), *levels("one", [70])]
    return write_all(tmp_path / "records", made)


def test_rows_differ_from_the_named_one_by_welch_and_by_seed(records):
    shown = differences(build_board([records]), "moco")
    (kscl,) = [line for line in shown.splitlines() if line.startswith("| kscl")]
    cells = [cell.strip() for cell in kscl.split("|")]
    low, high = welch_interval([61, 63.1, 64.9], [60, 62, 64])
    paired = scipy.stats.ttest_1samp([1, 1.1, 0.9], 0).confidence_interval(0.95)
    assert cells[6:10] == [
        "+1.00",
        f"{low:+.2f} to {high:+.2f}",
        f"{paired.low:+.2f} to {paired.high:+.2f}",
        "3 and 3",
    ]
    (one,) = [line for line in shown.splitlines() if line.startswith("| one")]
    assert one.count("one seed: none") == 2
    assert "| moco" not in shown


def test_a_base_that_is_not_there_is_refused_with_those_that_are(records):
    with pytest.raises(KsclError, match="no such method; there are kscl, moco, one"):
        differences(build_board([records]), "mocco")


def test_a_base_of_two_lengths_is_named_with_its_epochs(tmp_path):
    made = []
    for epochs, level in ((100, 60), (200, 65)):
        settings = ("METHOD.NAME", "moco", "SOLVER.EPOCHS", str(epochs))
        made += runs(settings, level, seeds=2)
    board = build_board([write_all(tmp_path, made)], check_stale=False)
    with pytest.raises(KsclError, match="which of moco resnet50 200 5 40%; moco resnet50 100"):
        differences(board, "moco")
    shown = differences(board, "moco@200")
    assert "| moco   | resnet50 |    100 |" in shown
    assert "| moco   | resnet50 |    200 |" not in shown


def test_the_board_goes_between_its_marks_and_says_where_it_is_from(records, tmp_path, capsys):
    document = tmp_path / "RESULTS.md"
    document.write_text(DOCUMENT)
    output = ["--output-dir", str(tmp_path / "board"), "--against", "moco"]
    for _ in range(2):  # again, over what it wrote itself
        assert main([str(records), *output, "--insert", str(document), "one"]) == 0
    text = document.read_text()
    assert text.startswith("before\n<!-- board one -->\n| method")
    assert text.endswith("<!-- end of board one -->\nafter\n")
    assert "outdated" not in text
    assert text.count("From 7 records; seeds 0; code ") == 1
    assert capsys.readouterr().out.count("+1.00") == 2


@pytest.mark.parametrize("text", ["", DOCUMENT + DOCUMENT, DOCUMENT.replace("end of ", "")])
def test_a_document_without_its_marks_is_left_as_it_is(tmp_path, text):
    document = tmp_path / "RESULTS.md"
    document.write_text(text)
    with pytest.raises(KsclError, match="once and in this order, <!-- board one -->"):
        insert(document, "one", "new")
    assert document.read_text() == text
    with pytest.raises(KsclError, match="No such file"):
        insert(tmp_path / "nowhere.md", "one", "new")
