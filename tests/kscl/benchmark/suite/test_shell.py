"""The commands of a suite as a shell script, run by sh."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

from kscl.benchmark.suite.execute import look
from kscl.benchmark.suite.shell import FORMATS, commands_text
from kscl.benchmark.suite.stages import Stage
from kscl.commands.run_suite import main
from tests.helpers.chain import smoke_suite


def stages_in(folder: Path) -> list[Stage]:
    """Two stages in a row, one beside them, and a board that writes down what it shows."""

    def stage(name: str, *needs: Stage) -> Stage:
        place = f"{folder}/{name}"
        return Stage(f"a/{name}", "knn", "mkdir", (place,), needs, name[0] * 64, place)

    one = stage("one")
    two, beside = stage("two", one), stage("beside")
    board = folder / "board.sh"
    board.write_text(f'#!/bin/sh\nfor word; do echo "$word"; done >"{folder}/board"\n')
    board.chmod(0o755)
    shown = (one.folder, two.folder, beside.folder)
    words = (*shown, "--title", "it's $5")
    last = Stage("board", "board", str(board), words, (one, two, beside), "b" * 64, f"{folder}/b")
    return [one, two, beside, last]


def run(stages: list[Stage], folder: Path) -> int:
    script = folder / "script"
    script.write_text(commands_text(stages, folder / ".stages", "sh"))
    return subprocess.run(["sh", script], cwd=folder, capture_output=True).returncode


def test_every_stage_is_run_once_and_the_suite_knows_what_is_done(tmp_path):
    stages = stages_in(tmp_path)
    assert run(stages, tmp_path) == 0
    assert run(stages, tmp_path) == 0  # mkdir would fail if it were run again
    statuses = [state.status for state in look(stages, tmp_path / ".stages")]
    assert statuses == ["done", "done", "done", "to do"]
    shown = [stage.folder for stage in stages[:3]]
    assert (tmp_path / "board").read_text().splitlines() == [*shown, "--title", "it's $5"]


def test_a_stage_that_fails_stops_what_needs_it_and_nothing_else(tmp_path):
    one, two, beside, board = stages_in(tmp_path)
    one = replace(one, program="false")
    two = replace(two, needs=(one,))
    board = replace(board, needs=(one, two, beside))
    assert run([one, two, beside, board], tmp_path) != 0
    assert not Path(two.folder).exists()
    assert (tmp_path / "board").read_text().splitlines()[0] == beside.folder


def test_a_folder_with_a_space_in_its_name_is_quoted(tmp_path):
    folder = tmp_path / "of mine"
    folder.mkdir()
    assert run(stages_in(folder), folder) == 0


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
