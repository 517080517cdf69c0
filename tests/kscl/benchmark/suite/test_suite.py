"""The suite: stages keyed by what goes into them, run once, taken up again after any kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from kscl.benchmark.suite.spec import read_suite
from kscl.benchmark.suite.stages import plan
from kscl.commands import run_suite
from kscl.main import VERBS
from kscl.records.record import find_records
from tests.helpers.chain import TINY_SHAPES, numbers, smoke_suite
from tests.helpers.commands import ROOT, tool
from tests.helpers.runs import wait_until


@pytest.fixture
def undisturbed(chain) -> Path:
    return chain.folder


@pytest.mark.smoke
def test_one_command_goes_from_pixels_to_the_leaderboard(undisturbed):
    board = undisturbed / "output" / "leaderboard"
    assert {path.suffix for path in board.iterdir()} == {".txt", ".md", ".csv", ".json", ".html"}
    text = (board / "leaderboard.md").read_text()
    assert "kscl" in text
    assert "random" in text
    assert "data:image/png" in (board / "leaderboard.html").read_text()  # the basis images
    said = (undisturbed / "said.txt").read_text()
    assert "\\" in text  # Markdown's escapes, not for a terminal
    assert "\\" not in said
    words = " ".join(said.split())
    assert words.count("One seed: seed-to-seed variation not measured.") == 1  # detection: too low
    assert "95% CI over test images" in words
    assert said.count("--num-seeds 3") == 1
    assert len(said.splitlines()) <= 25
    lines = said.strip().splitlines()
    assert max(map(len, lines[:-1])) <= 100  # the last has the page's path
    assert lines[0].startswith("method")
    assert lines[-1] == f"The page is {board / 'leaderboard.html'}"


@pytest.mark.slow
def test_a_pretrained_row_is_made_again_from_its_records(undisturbed, tmp_path):
    for path, old in find_records(undisturbed / "output" / "kscl").records.items():
        if old.kind == "pretrain":
            continue
        again = tmp_path / old.kind
        done = tool("reproduce", path, "--output-dir", again, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        (new,) = [it for it in find_records(again).records.values() if it.kind == old.kind]
        assert new.metrics == old.metrics


@pytest.mark.full
def test_a_second_run_runs_nothing_again(undisturbed, capfd):
    records = {p: p.stat().st_mtime_ns for p in undisturbed.rglob("record.json")}
    assert run_suite.main([str(undisturbed / "suite.yaml")]) == 0
    said = capfd.readouterr().out
    assert "--num-seeds 3" in said
    assert records == {p: p.stat().st_mtime_ns for p in undisturbed.rglob("record.json")}


def test_the_dry_run_tells_what_is_done_and_what_is_to_do(undisturbed, tmp_path, capsys):
    shown = {}
    for suite in (undisturbed / "suite.yaml", smoke_suite(tmp_path)):
        assert run_suite.main([str(suite), "--dry-run", "--skip-check"]) == 0
        shown[suite.parent] = capsys.readouterr().out
    assert "kscl/seed0/pretrain" in shown[undisturbed]
    assert "9 of 10 stages done" in shown[undisturbed]
    assert "Time to go not known yet; 0 of 10 stages done" in shown[tmp_path]
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("trial", ["", "seed0"])
def test_the_dry_run_shows_what_another_process_is_running(tmp_path, capsys, trial):
    suite = smoke_suite(tmp_path)
    stage = next(s for s in plan(read_suite(str(suite))) if s.name == "kscl/seed0/pretrain")
    folder = Path(stage.folder) / trial
    program = f"""
import sys
from pathlib import Path
from kscl.runtime.files import only_run_in
with only_run_in(Path({str(folder)!r})):
    print("held", flush=True)
    sys.stdin.read()
"""
    shown = []
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as other:
        assert other.stdout.readline() == b"held\n"
        for _ in range(2):  # looking takes nothing away from the one that runs
            assert run_suite.main([str(suite), "--dry-run", "--skip-check"]) == 0
            shown.append(status_of(stage.name, capsys.readouterr().out))
        other.communicate()
    assert run_suite.main([str(suite), "--dry-run", "--skip-check"]) == 0
    shown.append(status_of(stage.name, capsys.readouterr().out))
    assert shown == ["running", "running", "to do"]


def status_of(name: str, text: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return line.removeprefix(name).strip()


def test_the_commands_can_be_printed_for_a_scheduler(tmp_path, capsys):
    assert run_suite.main([str(smoke_suite(tmp_path)), "--print-commands"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:2] == ["kscl", "shapes"]
    assert lines[-1][:2] == ["kscl", "board"]
    assert all({words[1], " ".join(words[1:3])} & VERBS.keys() for words in lines)


@pytest.fixture(scope="module")
def half_failed(tmp_path_factory, chain):
    """One pretraining without images, and two evaluations by nearest neighbors."""
    folder = tmp_path_factory.mktemp("half_failed")
    (folder / "shapes").symlink_to(chain.shapes)
    suite = yaml.safe_load(smoke_suite(folder).read_text())
    suite["contenders"]["kscl"]["overrides"]["DATA.TRAIN"] = str(folder / "nowhere")
    three = suite["evaluations"]["knn"] | {"kind": "knn"}
    one = three | {"overrides": three["overrides"] | {"KNN.K": [1]}}
    suite |= {"shapes": {}, "evaluations": {"three": three, "one": one}}
    (folder / "text.md").write_text("<!-- board b -->\nall\n<!-- end of board b -->\n")
    insert = ("--insert", folder / "text.md", "b")
    return folder, tool("run_suite", smoke_suite(folder, **suite), "--skip-check", *insert)


@pytest.mark.full
def test_a_stage_that_fails_is_shown_and_does_not_stop_the_others(half_failed):
    folder, done = half_failed
    assert done.returncode == 1
    assert "kscl/seed0/pretrain failed" in done.stdout
    assert str(folder / "nowhere") in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Not run")]
    assert "kscl/seed0/three" in line
    assert "random/seed0/three" not in line
    assert (folder / "output" / "leaderboard" / "leaderboard.html").exists()


@pytest.mark.full
def test_a_board_that_lacks_results_is_not_put_into_a_document(half_failed):
    folder, done = half_failed
    assert "nothing was written into" in done.stdout
    assert "\nall\n" in (folder / "text.md").read_text()


@pytest.mark.full
def test_two_neighbor_evaluations_run_and_have_columns_of_their_own(half_failed):
    folder, done = half_failed
    assert "random/seed0/one" not in done.stdout
    board = (folder / "output" / "leaderboard" / "leaderboard.md").read_text()
    assert "kNN (a)" in board
    assert "kNN (b)" in board
    names = [line for line in board.splitlines() if line.startswith("## knn")]
    assert len(names) == 2
    assert {name.split("-T")[0] for name in names} == {"## knn1", "## knn3"}  # the k of each


@pytest.mark.slow
def test_a_suite_killed_in_every_stage_ends_in_the_same_leaderboard(undisturbed, tmp_path):
    suite = smoke_suite(tmp_path)
    command = [sys.executable, "-W", "ignore", "tools/run_suite.py", str(suite)]
    for number, stage in enumerate(plan(read_suite(suite))):
        log = next_log(tmp_path, stage.name)
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        while process.poll() is None and not log():
            time.sleep(0.05)
        time.sleep(1.5)  # into the stage
        os.kill(process.pid, (signal.SIGTERM, signal.SIGKILL)[number % 2])
        process.wait()
    done = tool("run_suite", suite, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(numbers(tmp_path)) > 8
    assert numbers(tmp_path) == numbers(undisturbed)


def next_log(folder: Path, name: str):
    pattern = f"{name.replace('/', '_')}-*.log"
    return lambda: list((folder / "output" / ".stages").glob(pattern))


# Ctrl-C


def hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background process may ignore them


@pytest.mark.full
def test_a_suite_that_is_interrupted_while_it_checks_stops_at_once_with_its_checks(tmp_path):
    suite = smoke_suite(tmp_path)
    command = [sys.executable, "-W", "ignore", "tools/run_suite.py", str(suite)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        command, cwd=ROOT, preexec_fn=hear_interrupts, start_new_session=True, **pipes
    )
    line = process.stderr.readline()
    while "Checking the stages" not in line:
        line = process.stderr.readline()
    while not (checks := children_of(process.pid)):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, out + err
    assert out.splitlines()[-1] == "Stopped. Run it again to continue."
    assert "Traceback" not in out + err
    wait_until(lambda: not any(Path(f"/proc/{check}").exists() for check in checks))


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.mark.full
def test_an_interrupted_suite_says_how_to_continue_and_calls_no_stage_failed(tmp_path):
    data = {"output_dir": str(tmp_path / "shapes"), **TINY_SHAPES, "unlabeled": 100_000}
    suite = smoke_suite(tmp_path, shapes=data)
    command = [sys.executable, "-W", "ignore", "tools/run_suite.py", str(suite), "--skip-check"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, preexec_fn=hear_interrupts, **pipes)
    log = next_log(tmp_path, "shapes")
    while process.poll() is None and not log():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    assert out.splitlines()[-1] == "Stopped. Run it again to continue."
    assert "0 of 10 stages done" in err
    assert "failed" not in out
    assert "Traceback" not in out + err
    assert not list((tmp_path / "output/.stages").glob("*.json"))
