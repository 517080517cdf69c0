"""The benchmark tool: figures with bounds, and a bound that is missed is told."""

from __future__ import annotations

import json
import time

import pytest

from tests.benchmarks import harness, run
from tests.helpers.commands import tool


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.setattr(harness, "FIGURES", {})
    monkeypatch.setattr(run, "FIGURES", harness.FIGURES)
    monkeypatch.setattr(run, "load_figures", lambda: None)


def test_every_figure_is_listed_with_its_bound():
    done = tool("benchmark", "--list")
    assert done.returncode == 0, done.stderr
    assert ">=" in done.stdout


def test_an_unknown_name_lists_the_known_ones():
    done = tool("benchmark", "--only", "no-such-figure")
    assert done.returncode == 2
    assert "no figure has 'no-such-figure'" in done.stderr


def test_a_missed_bound_is_marked_and_the_exit_code_says_so(figures, tmp_path, capsys):
    harness.figure("good", "fine", at_least=1)(lambda: 2.0)
    harness.figure("bad", "too slow", at_most=1)(lambda: 2.0)
    harness.figure("told", "only reported")(lambda: 2.0)
    output = tmp_path / "bench.json"
    assert run.main(["--output", str(output)]) == 1
    rows = {row["name"]: row for row in json.loads(output.read_text())["figures"]}
    assert (rows["good"]["holds"], rows["bad"]["holds"], rows["told"]["holds"]) == (1, 0, 1)
    assert "MISSED" in capsys.readouterr().out


def test_a_nan_never_holds():
    figure = harness.Figure("x", "", float, at_least=1, at_most=None, unit="x")
    assert not figure.holds(float("nan"))


def test_the_time_ratio_is_the_ratio_of_the_times():
    ratio = harness.time_ratio(lambda: time.sleep(0.02), lambda: time.sleep(0.005), rounds=5)
    assert 2.5 < ratio < 5
