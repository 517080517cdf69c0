"""The built wheel works in an environment of its own, away from the repository."""

from __future__ import annotations

import sys

import pytest

from tests.helpers.commands import ROOT, run


@pytest.mark.slow
def test_the_wheel_runs_the_demo_in_an_empty_folder(tmp_path):
    def succeed(*words: object, **options: object) -> str:
        # Without the path of a working tree, which would be imported instead of the wheel.
        done = run(*map(str, words), env={"PYTHONPATH": ""}, timeout=3600, **options)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    source, empty = tmp_path / "source", tmp_path / "empty"
    empty.mkdir()
    succeed("git", "clone", "-q", ROOT, source)
    succeed(sys.executable, "-m", "venv", tmp_path / "venv")
    kscl, python = tmp_path / "venv" / "bin" / "kscl", tmp_path / "venv" / "bin" / "python"
    pip = (python, "-m", "pip", "-q", "--disable-pip-version-check")
    succeed(*pip, "wheel", "--no-deps", "-w", tmp_path, source)
    succeed(*pip, "install", "-c", ROOT / "requirements.txt", *tmp_path.glob("*.whl"))
    succeed(kscl, "install-detectron2", cwd=empty)
    assert "Everything needed is here." in succeed(kscl, "doctor", cwd=empty)
    assert "commit" in succeed(kscl, "--version", cwd=empty)
    said = succeed(kscl, "demo", cwd=empty)
    assert "random" in said
    assert len(said.splitlines()) <= 25
    assert list(empty.rglob("leaderboard.html"))
