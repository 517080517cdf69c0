"""A detector that finds next to nothing is neither ranked nor compared, and the board says so."""

from __future__ import annotations

import pytest

from kscl.benchmark.leaderboard.answer import answers, warnings
from kscl.benchmark.leaderboard.rows import build_board
from kscl.benchmark.leaderboard.tables import overview
from kscl.commands.leaderboard import main
from kscl.records.record import record_id
from tests.helpers.leaderboard_records import write_all
from tests.kscl.benchmark.leaderboard.test_answer import board_of, records

LOW, HIGH = [-20.4, -20.5, -20.3], [-19.4, -19.5, -19.3]  # AP50 is 25 higher: 4.6 and 5.6


def test_detectors_that_are_all_too_low_are_not_compared_and_none_is_best(tmp_path):
    board = board_of(tmp_path, [-22.0, -22.1, -22.2], [-24.0, -24.1, -24.2])  # AP50 is 25 higher
    (section,) = board.sections
    assert all(row.results[section.protocol].measures["AP50"].mean < 5 for row in section.rows)
    for row in section.rows:
        for measure in row.results[section.protocol].measures.values():
            assert measure.standing.verdict == "not tested"
    (answer,) = answers(board)
    assert "too low to compare" in answer.sentence
    assert any("too low" in text for text in warnings(board))


def verdicts_of(board) -> dict[str, str]:
    (section,) = board.sections
    return {
        row.entry.method: row.results[section.protocol].measures["AP"].standing.verdict
        for row in section.rows
    }


def test_a_detector_that_is_too_low_is_never_best_though_another_one_is_not(tmp_path):
    found = records(LOW, HIGH)
    for record in found:
        if record["kind"] == "detection" and record["metrics"]["AP"] < -20:
            record["metrics"]["AP"] += 3.0  # the poorer AP50 has the better AP
    ids = [{**record, "id": record_id(record)} for record in found]
    write_all(tmp_path, ids)
    board = build_board([tmp_path], check_stale=False, with_reported=False)
    assert board.problems == []
    assert verdicts_of(board) == {"kscl": "not tested", "random": "not tested"}
    assert "**" not in overview(board)
    (answer,) = answers(board)
    assert "cannot be compared" in answer.sentence
    assert "the lowest AP50 4.5 of kscl is too low" in answer.sentence
    assert "adds" not in answer.sentence
    warning, starts = warnings(board)
    assert warning.startswith("Detector: kscl (")
    assert "lowest AP50 4.5" in warning
    assert "not ranked" in warning
    assert "the best AP50 is 5.6." in starts


@pytest.mark.parametrize(("ap", "works"), [(-0.2, False), (0.1, True)])  # AP50 24.8 and 25.1
def test_a_comparison_without_any_working_detector_says_so(tmp_path, ap, works, capsys):
    write_all(tmp_path / "in", records([ap, ap, ap], [-10.0, -10.1, -10.2]))
    words = [str(tmp_path / "in"), "--output-dir", str(tmp_path / "out"), "--no-stale-check"]
    assert main(words) == 0
    sentence = f"the best AP50 is {ap + 25:.1f}. Below 25, this compares starts of training"
    for said in (
        capsys.readouterr().out,
        (tmp_path / "out/leaderboard.md").read_text(),
        (tmp_path / "out/leaderboard.html").read_text(),
        (tmp_path / "out/leaderboard.json").read_text(),
    ):
        assert (sentence in said) is not works


def test_what_is_gained_over_a_detector_that_is_too_low_is_told_with_that(tmp_path):
    (answer,) = answers(board_of(tmp_path, [30.0, 30.5, 31.0], LOW))
    assert "kscl pretraining adds 50.9 AP over random weights" in answer.sentence
    assert "lowest AP50 4.5 of random weights is too low" in answer.sentence


def test_one_run_that_is_too_low_keeps_its_row_from_being_called_best(tmp_path):
    assert verdicts_of(board_of(tmp_path, [30.0, 30.5, -22.0], [1.0, 1.1, 1.2])) == {
        "kscl": "not tested",
        "random": "not tested",
    }
