"""Running stages: notes about what is done, the time to go, and scripts for other engines."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kscl.benchmark.suite import progress
from kscl.benchmark.suite.execute import (
    DONE,
    FAILED,
    RUNNING,
    TO_DO,
    State,
    look,
    of_what_exists,
    run_stages,
)
from kscl.benchmark.suite.progress import (
    FORMATS,
    Progress,
    board_command,
    commands_text,
    table,
    to_go,
)
from kscl.benchmark.suite.stages import Stage
from kscl.commands.run_suite import main
from kscl.errors import KsclError
from tests.helpers.chain import smoke_suite
from tests.helpers.faults.full_disk import small_files
from tests.helpers.slurm import stage


def two_stages(folder: Path) -> list[Stage]:
    """Two stages, the second of which needs the first, that only make their folders."""
    first = stage(folder, "one")
    return [first, stage(folder, "two", first, kind="knn")]


def run(folder: Path) -> list[str]:
    """Run what is not done; return the states before."""
    states = look(two_stages(folder), folder / ".stages")
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
    "binary": bytes(range(256)),
    "another type": b"[]",
    "no key": b'{"kind": "pretrain", "seconds": 1.0}',
    "a time that is text": b'{"key": "1", "kind": "pretrain", "seconds": "1"}',
    "not a number": b'{"key": "1", "kind": "pretrain", "seconds": NaN}',
    "a negative time": b'{"key": "1", "kind": "pretrain", "seconds": -1}',
    "an unknown field": b'{"key": "1", "kind": "pretrain", "seconds": 1, "x": 1}',
    "nested deep": b"[" * 100_000,
}


def test_the_suites_estimates_are_shown_until_a_stage_of_the_kind_has_finished(tmp_path):
    first, second = two_stages(tmp_path)
    first = replace(first, estimate=600)
    stages = [first, replace(second, needs=(first,), estimate=60.0)]
    states = look(stages, tmp_path / ".stages")
    shown = []
    run_stages(states, tmp_path / ".stages", lambda states: shown.append(to_go(states)))
    assert shown[0] == "About 11:00 to go; 0 of 2 stages done"
    assert any(line == "About 1:00 to go; 1 of 2 stages done" for line in shown)
    assert all(state.expected < 60 for state in states)  # as measured
    again = look(stages, tmp_path / ".stages")
    assert again[0].expected < 60


def test_what_was_made_from_a_result_that_is_gone_is_run_again(tmp_path):
    assert run(tmp_path) == [TO_DO, TO_DO]
    assert run(tmp_path) == [DONE, DONE]
    (tmp_path / "one").rmdir()
    assert run(tmp_path) == [TO_DO, TO_DO]
    (tmp_path / "two").rmdir()
    assert run(tmp_path) == [DONE, TO_DO]


def test_what_was_made_from_another_backbone_is_kept_aside_and_made_again(tmp_path):
    """A pretraining that is made again by changed code gives other weights."""
    weights = tmp_path / "one/backbone.safetensors"
    digest = f"sha256sum {weights} | cut -c1-64 > {tmp_path}/two/record.json"
    made = f"mkdir -p {tmp_path}/two; test ! -e {tmp_path}/two/record.json && {digest}"

    def states(content: str) -> list[State]:
        pretrain = f"mkdir -p {tmp_path}/one; echo {content} > {weights}"
        first = stage(tmp_path, "one", words=("sh", "-c", pretrain))
        probe = stage(tmp_path, "two", first, kind="knn", words=("sh", "-c", made))
        return look([first, probe], tmp_path / ".stages")

    notes = tmp_path / ".stages"
    assert run_stages(states("before"), notes, lambda _: None) == 0
    old = (tmp_path / "two/record.json").read_text()
    weights.unlink()
    weights.parent.rmdir()
    assert run_stages(states("after"), notes, lambda _: None) == 0
    assert (tmp_path / "two.old1/record.json").read_text() == old
    assert (tmp_path / "two/record.json").read_text() != old
    note_of(tmp_path, "two").unlink()  # as if the suite had been stopped before the probe's turn
    weights.write_text("once more")
    assert run_stages(states("unused"), notes, lambda _: None) == 0
    assert (tmp_path / "two.old2/record.json").exists()


def test_a_longer_pretraining_is_expected_to_take_longer_by_its_length(tmp_path):
    def longer(name: str, length: int) -> Stage:
        return stage(tmp_path, name, key=name * 64, length=length)

    (tmp_path / "8").mkdir()
    note = {"key": "8" * 64, "kind": "pretrain", "seconds": 400.0}
    folder = tmp_path / ".stages"
    folder.mkdir()
    (folder / "a_8-88888888.json").write_text(json.dumps(note))
    states = look([longer("8", 8), longer("4", 4), longer("1", 1)], folder)
    assert [state.expected for state in states] == [400.0, 200.0, 50.0]
    assert to_go(states) == "About 4:10 to go; 1 of 3 stages done"
    stages = [replace(it, estimate=60.0) for it in (longer("2", 2), longer("1", 1))]
    estimated = look(stages, tmp_path / "empty")
    assert [state.expected for state in estimated] == [120.0, 60.0]


def test_a_stage_of_a_larger_network_is_not_expected_to_take_what_others_took(tmp_path):
    small, large = (stage(tmp_path, name, network=name) for name in ("small", "large"))
    more = stage(tmp_path, "more", network="small")
    stages = [small, replace(large, estimate=600.0), more]
    states = look(stages, tmp_path / ".stages")
    assert run_stages(states[:1], tmp_path / ".stages", lambda _: None) == 0
    (done, larger, like_it) = look(stages, tmp_path / ".stages")
    assert larger.expected == 600.0
    assert like_it.expected == done.seconds < 60


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
        look(two_stages(tmp_path), tmp_path / ".stages")
    assert str(note) in str(error.value)


def test_a_file_where_the_folder_of_notes_belongs_is_named(tmp_path):
    (tmp_path / ".stages").write_text("")
    states = look(two_stages(tmp_path), tmp_path / ".stages")
    with pytest.raises(KsclError) as error:
        run_stages(states, tmp_path / ".stages", lambda states: None)
    assert str(tmp_path / ".stages") in str(error.value)


@pytest.mark.parametrize(("limit", "file"), [(0, ".log"), (80, ".json")])
def test_a_full_disk_is_told_with_the_file_and_the_suite_goes_on_afterwards(tmp_path, limit, file):
    folder = tmp_path / "s"
    states = look(two_stages(folder), folder / ".stages")
    program = f"$ mkdir -p {folder}/one\n"
    limit = limit and len(program)  # the log of the first stage fits, its note does not
    with small_files(limit), pytest.raises(KsclError) as error:
        run_stages(states, folder / ".stages", lambda states: None)
    assert f"a_one-{two_stages(folder)[0].key[:8]}{file}" in str(error.value)
    assert str(error.value).isprintable()
    assert not list((folder / ".stages").glob("*.json"))
    assert run(folder) == [TO_DO, TO_DO]
    assert run(folder) == [DONE, DONE]


def test_a_stage_that_fails_has_no_note(tmp_path):
    states = look([stage(tmp_path, "one", words=("false",))], tmp_path / ".stages")
    assert run_stages(states, tmp_path / ".stages", lambda states: None) == 1
    assert states[0].status == FAILED
    assert not list((tmp_path / ".stages").glob("*.json"))


# How far a suite is


def state(name: str, status: str, seconds: float | None, expected: float | None) -> State:
    return State(Stage(name, "linear", "tool", "folder"), status, seconds, expected)


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
    assert lines[0] == "About 5:40 to go plus 1 of unknown time; 1 of 4 stages done"
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
        made[name] = Stage(name, "linear", "tool", "folder", before)
    return to_go([State(stage, TO_DO, None, 60.0) for stage in made.values()], jobs)


def test_jobs_do_not_shorten_stages_that_wait_for_each_other():
    chain = {"pretrain": (), "convert": ("pretrain",), "detection": ("convert",)}
    assert to_go_of(chain, jobs=4).startswith("About 3:00 to go")
    assert to_go_of({"last": ()}, jobs=4).startswith("About 1:00 to go")
    apart = {str(number): () for number in range(8)}
    assert to_go_of(apart, jobs=4).startswith("About 2:00 to go")
    assert to_go_of(chain | apart, jobs=2).startswith("About 5:30 to go")


def test_the_chain_begins_after_what_is_done():
    first = Stage("pretrain", "pretrain", "tool", "folder")
    second = Stage("linear", "linear", "tool", "folder", (first,))
    states = [State(first, DONE, 500.0, 500.0), State(second, RUNNING, 20.0, 60.0)]
    assert to_go(states, jobs=2).startswith("About 0:40 to go")


def test_a_stage_past_its_estimate_has_an_unknown_time_to_go():
    late, next_one = state("a", RUNNING, 90.0, 60.0), state("b", TO_DO, None, 60.0)
    assert to_go([late, next_one]) == "About 1:00 to go plus 1 of unknown time; 0 of 2 stages done"
    assert to_go([late]) == "Time to go not known yet; 0 of 1 stages done"
    assert to_go([late, late, next_one]) == "Time to go not known yet; 0 of 3 stages done"


def test_a_terminal_has_one_line_that_is_updated(states, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    written = io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", written)
    show = Progress(1)
    show(states)
    show(states)
    first, second = written.getvalue().split("\r\x1b[2K")[1:]
    # The time of the leaderboard is not known, so the stages are counted.
    assert first == second
    assert first.startswith("25%: About 5:40 to go plus 1 of unknown time; 1 of 4 stages done; now")
    assert len(first) < 70
    for it in states:
        it.status = DONE
    show(states)
    assert written.getvalue().endswith("100%: 4 of 4 stages done\n")


def test_the_percentage_is_of_the_time(states):
    show, states[3].expected = Progress(1), 5.0
    lines = []
    show.line = lambda text, is_last: lines.append(text)
    show(states)
    # 5 and 60 seconds are spent; 240, 100 and 5 are left.
    assert lines[0].startswith("16%: About 5:45 to go; 1 of 4 stages done; now ")
    assert lines[0].endswith("seed0/pretrain")


def test_a_pipe_gets_a_line_per_minute(states, monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    show = Progress(jobs=1)
    for _ in range(130):  # seconds
        now[0] += 1
        show(states)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all("About 5:40 to go" in line for line in lines)


# The commands of a suite as a shell script


def stages_in(folder: Path) -> list[Stage]:
    """Two stages in a row, one beside them, and a board that writes down what it shows."""

    def once(name: str, *needs: Stage) -> Stage:
        return stage(folder, name, *needs, kind="knn", words=("mkdir", f"{folder}/{name}"))

    one = once("one")
    two, beside = once("two", one), once("beside")
    board = folder / "board.sh"
    board.write_text(f'#!/bin/sh\nfor word; do echo "$word"; done >"{folder}/board"\n')
    board.chmod(0o755)
    shown = (one.folder, two.folder, beside.folder)
    words = (str(board), "--title", "it's $5")
    last = stage(folder, "b", one, two, beside, kind="board", inputs=shown, words=words)
    return [one, two, beside, last]


def run_script(stages: list[Stage], folder: Path) -> int:
    script = folder / "script"
    script.write_text(commands_text(stages, folder / ".stages", "sh"))
    return subprocess.run(["sh", script], cwd=folder, capture_output=True).returncode


def test_every_stage_is_run_once_and_the_suite_knows_what_is_done(tmp_path):
    stages = stages_in(tmp_path)
    assert run_script(stages, tmp_path) == 0
    assert run_script(stages, tmp_path) == 0  # mkdir would fail if it were run again
    statuses = [state.status for state in look(stages, tmp_path / ".stages")]
    assert statuses == ["done", "done", "done", "to do"]
    shown = [stage.folder for stage in stages[:3]]
    assert (tmp_path / "board").read_text().splitlines() == [*shown, "--title", "it's $5"]


def test_a_stage_that_fails_stops_what_needs_it_and_nothing_else(tmp_path):
    one, two, beside, board = stages_in(tmp_path)
    one = replace(one, words=("false",))
    two = replace(two, needs=(one,))
    board = replace(board, needs=(one, two, beside))
    assert run_script([one, two, beside, board], tmp_path) != 0
    assert not Path(two.folder).exists()
    assert (tmp_path / "board").read_text().splitlines()[0] == beside.folder


def test_a_board_without_any_result_does_not_show_those_of_others(tmp_path):
    failed = stage(tmp_path, "one", words=("false",))
    board = stage(tmp_path, "b", failed, kind="board", inputs=(failed.folder,), words=("true",))
    assert of_what_exists(board, complete=False).inputs == (failed.folder,)
    script = board_command(board, ["echo"])
    shown = subprocess.run(["sh", "-c", script], capture_output=True, text=True).stdout
    assert shown.split()[0] == failed.folder


def test_a_folder_with_a_space_in_its_name_is_quoted(tmp_path):
    folder = tmp_path / "of mine"
    folder.mkdir()
    assert run_script(stages_in(folder), folder) == 0


def test_the_list_has_one_command_per_line(tmp_path):
    stages = stages_in(tmp_path)
    lines = commands_text(stages, tmp_path / ".stages", FORMATS[0]).splitlines()
    assert lines[0] == f"mkdir {stages[0].folder}"
    assert len(lines) == 4


def test_a_board_that_a_scheduler_makes_is_put_into_no_document(tmp_path, capsys):
    words = [str(smoke_suite(tmp_path)), "--insert", str(tmp_path / "text.md"), "b"]
    for where in (["--print-commands"], ["--slurm", "profile.yaml"]):
        assert main([*words, *where]) == 2
        assert "--insert needs all results" in capsys.readouterr().err
