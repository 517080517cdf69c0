"""How far a suite is: the time to go first, within 80 columns, and a line per minute in a log."""

from __future__ import annotations

import io
import sys

import pytest

from kscl.benchmark.suite import progress
from kscl.benchmark.suite.execute import DONE, RUNNING, TO_DO, State
from kscl.benchmark.suite.progress import Lines, LiveTable, table, to_go
from kscl.benchmark.suite.stages import Stage


def state(name: str, status: str, seconds: float | None, expected: float | None) -> State:
    stage = Stage(name, "linear", "kscl-linear-eval", (), (), "key", "folder")
    return State(stage, status, seconds, expected)


@pytest.fixture
def states() -> list[State]:
    long = "a-contender-with-quite-a-long-name-" * 3
    return [
        state("shapes", DONE, 5.0, 5.0),
        state(f"{long}/seed0/pretrain", RUNNING, 60.0, 300.0),
        state(f"{long}/seed0/linear", TO_DO, None, 100.0),
        state("leaderboard", TO_DO, None, None),
    ]


def test_the_table_begins_with_the_time_to_go_and_fits(states):
    lines = table(states).splitlines()
    # 300 - 60 of the one that runs, and 100 of the next.
    assert lines[0] == "About 5:40 to go and 1 of unknown time; 1 of 4 stages done"
    assert table(states, jobs=2).startswith("About 4:00 to go")  # of the longest
    assert len(lines) == 5
    assert max(map(len, lines)) <= 80
    assert "seed0/pretrain" in lines[2]
    assert "1:00 of about 5:00" in lines[2]


def to_go_of(needs: dict[str, tuple[str, ...]], jobs: int) -> str:
    """Return the time to go of stages of one minute each."""
    made: dict[str, Stage] = {}
    for name, needed in needs.items():
        before = tuple(made[other] for other in needed)
        made[name] = Stage(name, "linear", "kscl-linear-eval", (), before, "key", "folder")
    return to_go([State(stage, TO_DO, None, 60.0) for stage in made.values()], jobs)


def test_jobs_do_not_shorten_stages_that_wait_for_each_other():
    chain = {"pretrain": (), "convert": ("pretrain",), "detection": ("convert",)}
    assert to_go_of(chain, jobs=4).startswith("About 3:00 to go")
    assert to_go_of({"last": ()}, jobs=4).startswith("About 1:00 to go")
    apart = {str(number): () for number in range(8)}
    assert to_go_of(apart, jobs=4).startswith("About 2:00 to go")
    assert to_go_of(chain | apart, jobs=2).startswith("About 5:30 to go")


def test_the_chain_begins_after_what_is_done():
    first = Stage("pretrain", "pretrain", "kscl-pretrain", (), (), "key", "folder")
    second = Stage("linear", "linear", "kscl-linear-eval", (), (first,), "key", "folder")
    states = [State(first, DONE, 500.0, 500.0), State(second, RUNNING, 20.0, 60.0)]
    assert to_go(states, jobs=2).startswith("About 0:40 to go")


def test_a_terminal_is_never_wider_than_80_columns(states, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    LiveTable(1)(states)
    shown = [line.replace("\x1b[2K", "") for line in written.getvalue().splitlines()[:-1]]
    assert shown[0].startswith("About 5:40 to go")
    assert max(map(len, shown)) <= 80


def test_a_log_gets_a_line_per_minute_beside_those_of_the_stages(states, monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    show = Lines(states, jobs=1)
    for _ in range(130):  # seconds
        now[0] += 1
        show(states)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("About 5:40 to go") for line in lines)
    assert "pretrain 1:00 of about 5:00" in lines[0]
    states[1].status, states[1].seconds = DONE, 301.0
    show(states)
    assert capsys.readouterr().out.splitlines() == [f"{states[1].stage.name}: done 5:01"]
