"""The benchmark tool: figures with bounds, and each of them stands alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.benchmarks import harness, leaderboard, run, scoring
from tests.helpers.commands import ROOT, tool
from tests.helpers.commands import run as run_command


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.setattr(harness, "FIGURES", {})
    monkeypatch.setattr(run, "FIGURES", harness.FIGURES)
    monkeypatch.setattr(run, "load_figures", lambda: None)


def rows_of(output):
    return {row["name"]: row for row in json.loads(output.read_text())["figures"]}


def test_every_figure_is_listed_with_its_bound():
    done = tool("benchmark", "--list")
    assert done.returncode == 0, done.stderr
    assert ">=" in done.stdout


def test_an_unknown_name_lists_the_known_ones(figures, capsys):
    harness.figure("known", "fine", at_least=1)(lambda: 2.0)
    assert run.main(["--only", "no-such-figure"]) == 2
    errors = capsys.readouterr().err
    assert "no figure has 'no-such-figure'" in errors
    assert "known" in errors


def test_a_missed_bound_is_marked_and_the_exit_code_says_so(figures, tmp_path, capsys):
    harness.figure("good", "fine", at_least=1)(lambda: 2.0)
    harness.figure("bad", "too slow", at_most=1)(lambda: 2.0)
    harness.figure("told", "only reported")(lambda: 2.0)
    output = tmp_path / "bench.json"
    assert run.main(["--output", str(output)]) == 1
    statuses = {name: row["status"] for name, row in rows_of(output).items()}
    assert statuses == {"good": "holds", "bad": "missed", "told": "holds"}
    assert "MISSED" in capsys.readouterr().out


def test_a_figure_that_raises_does_not_lose_the_others(figures, tmp_path, capsys):
    def broken() -> float:
        raise TypeError("Binary Location Must be a String")

    harness.figure("a", "before", at_least=1)(lambda: 2.0)
    harness.figure("b", "broken", at_least=1)(broken)
    harness.figure("c", "after", at_least=1)(lambda: 3.0)
    output = tmp_path / "bench.json"
    assert run.main(["--output", str(output)]) == 1
    rows = rows_of(output)
    assert (rows["a"]["value"], rows["c"]["value"]) == (2.0, 3.0)
    assert rows["b"]["status"] == "failed"
    assert rows["b"]["reason"] == "TypeError: Binary Location Must be a String"
    assert "Binary Location" in capsys.readouterr().out


def test_a_figure_that_cannot_be_measured_here_is_skipped_with_what_it_needs(figures, tmp_path):
    def needs_chromium() -> float:
        raise harness.SkippedError("chromium is not installed")

    harness.figure("a", "page", at_least=1)(needs_chromium)
    output = tmp_path / "bench.json"
    assert run.main(["--output", str(output)]) == 0
    assert rows_of(output)["a"]["status"] == "skipped"
    assert rows_of(output)["a"]["reason"] == "chromium is not installed"


def test_the_page_s_figure_is_skipped_without_chromium(monkeypatch):
    monkeypatch.setattr(leaderboard, "MISSING", "chromium is not installed")
    with pytest.raises(harness.SkippedError, match="chromium"):
        leaderboard.leaderboard_sort()


def test_a_value_that_is_not_a_number_fails_even_without_a_bound(figures, tmp_path):
    harness.figure("a", "reported")(lambda: float("nan"))
    output = tmp_path / "bench.json"
    assert run.main(["--output", str(output)]) == 1
    assert rows_of(output)["a"]["status"] == "failed"
    assert "nan" in rows_of(output)["a"]["reason"]


WITHOUT_SCIKIT_LEARN = """
import sys
sys.modules["sklearn"] = None
from tests.benchmarks.run import main
sys.exit(main(["--only", "linear_eval", "--output", sys.argv[1]]))
"""


@pytest.mark.full
def test_a_module_that_does_not_import_is_a_failed_figure(tmp_path):
    output = tmp_path / "bench.json"
    done = run_command(sys.executable, "-W", "ignore", "-c", WITHOUT_SCIKIT_LEARN, output)
    assert done.returncode == 1, done.stderr
    row = rows_of(output)["linear_eval (module)"]
    assert row["status"] == "failed"
    assert "sklearn" in row["reason"]


def test_a_process_of_a_figure_that_ends_badly_tells_its_last_line():
    with pytest.raises(RuntimeError, match="No module named 'no_such_module'"):
        harness.in_own_process("no_such_module", "measure")


ENDLESS = """
import sys, time
from tests.benchmarks import harness, run
run.load_figures = lambda: None
harness.figure("a", "quick", at_least=1)(lambda: 2.0)
harness.figure("b", "endless", at_least=1)(lambda: time.sleep(600))
sys.exit(run.main(["--output", sys.argv[1]]))
"""


def hear_interrupts() -> None:
    """Undo what a shell does for a command in the background, which the tests may be."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_an_interruption_keeps_what_was_measured(number, code, tmp_path):
    output = tmp_path / "bench.json"
    command = [sys.executable, "-W", "ignore", "-c", ENDLESS, str(output)]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, preexec_fn=hear_interrupts
    )
    try:
        deadline = time.monotonic() + 120
        while not output.exists() or rows_of(output)["a"]["status"] != "holds":
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(30) == code
    finally:
        process.kill()
    rows = rows_of(output)
    assert rows["a"]["value"] == 2.0
    assert rows["b"]["status"] == "not measured"


def test_the_scorer_s_figure_finds_equal_numbers_where_scores_tie(monkeypatch):
    monkeypatch.setattr(scoring, "IMAGES", 40)
    assert scoring.voc07_scorer_against_detectron2() > 0


def test_the_scorer_s_figure_fails_where_the_numbers_differ(monkeypatch):
    monkeypatch.setattr(scoring, "IMAGES", 40)
    right = scoring.score

    def wrong(*words):
        return {kind: {**result, "AP75": 0.0} for kind, result in right(*words).items()}

    monkeypatch.setattr(scoring, "score", wrong)
    with pytest.raises(RuntimeError, match="AP75"):
        scoring.voc07_scorer_against_detectron2()


def test_a_nan_never_holds():
    figure = harness.Figure("x", "", float, at_least=1, at_most=None, unit="x")
    assert not figure.holds(float("nan"))


def test_the_time_ratio_is_the_ratio_of_the_times_under_any_load(monkeypatch):
    now, load = 0.0, iter([1.0] * 2 + [1.0, 1.0, 7.0, 7.0, 2.0, 2.0, 0.5, 0.5, 3.0, 3.0])

    def work(duration: float) -> None:
        nonlocal now
        now += duration * next(load)

    monkeypatch.setattr(harness.time, "perf_counter", lambda: now)
    assert harness.time_ratio(lambda: work(4.0), lambda: work(1.0), rounds=5) == pytest.approx(4)
