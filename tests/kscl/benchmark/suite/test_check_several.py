"""Many checks share few processes, and one that fails takes no other with it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kscl.benchmark.suite import check_several
from kscl.benchmark.suite.check_several import run_checks
from kscl.benchmark.suite.progress import show_checks
from kscl.errors import KsclError

TOOL = f"""#!{sys.executable}
import os, sys, time
word = sys.argv[1]
if word == "die":
    os._exit(3)
if word == "raise":
    raise ValueError("a bug")
if word == "sleep":
    time.sleep(60)
os.write(1, b"said by a library\\n")
print(os.getpid(), *sys.argv[1:])
sys.exit(1 if word == "bad" else 0)
"""


@pytest.fixture
def words_of(tmp_path, monkeypatch):
    """A function that runs a tool with some words; returns what it said, by word."""
    path = tmp_path / "bin/kscl-pretended"
    path.parent.mkdir()
    path.write_text(TOOL)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")

    def run(*words: str, processes: int = 1) -> dict[str, tuple[str, str]]:
        commands = [("kscl-pretended", word) for word in words]
        return {command[1]: said for command, said in run_checks(commands, processes)}

    return run


def answered(said: dict[str, tuple[str, str]], word: str) -> bool:
    return said[word][0].splitlines()[-1].split()[1] == word


def test_checks_share_as_many_processes_as_there_are_places(words_of):
    for processes in (1, 2):
        said = words_of("a", "b", "bad", "c", processes=processes)
        assert all(answered(said, word) for word in ("a", "b", "bad", "c"))
        assert len({output.split()[0] for output, _ in said.values()}) == processes


@pytest.mark.parametrize("word", ["die", "raise"])
def test_a_check_that_ends_badly_is_told_and_the_others_run(words_of, word):
    said = words_of("a", word, "b", "c")
    assert set(said) == {"a", word, "b", "c"}
    assert ("exit code 3" if word == "die" else "ValueError: a bug") in said[word][1]
    assert all(answered(said, other) for other in ("a", "b", "c"))


def test_a_check_without_end_is_told(words_of, monkeypatch):
    monkeypatch.setattr(check_several, "TIMEOUT", 2.0)
    assert "more than 2 s" in words_of("sleep")["sleep"][1]


def test_a_tool_that_is_not_installed_is_an_error():
    with pytest.raises(KsclError, match="kscl-missing"):
        list(run_checks([("kscl-missing", "a"), ("kscl-missing", "b")], 2))


def test_progress_is_a_line_per_check_and_on_a_terminal_one_line(capsys, monkeypatch):
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        for done in range(3):
            show_checks(done, 2, "kscl/seed0/pretrain" if done else "")
        text = capsys.readouterr().err
        assert text.count("\n") == (1 if terminal else 3)
        assert all(f"{done} of 2" in text for done in range(3))


def test_the_folder_for_own_data_is_not_part_of_the_repository():
    ignored = (Path(__file__).parents[4] / ".gitignore").read_text().splitlines()
    assert {"/data/", "/output/", "/datasets/"} <= set(ignored)
