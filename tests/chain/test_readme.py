"""Every command of the README runs, in its order, on smoke-sized settings."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT, run

# What makes each tool quick; everything else is as the README has it.
SMOKE = {
    "make_shapes.py": (
        *("--num-classes", "5", "--unlabelled", "32", "--train", "30", "--val", "20"),
        *("--detection-train", "8", "--detection-test", "4", "--image-size", "48"),
        *("--detection-size", "64", "--min-objects", "5", "--workers", "1"),
    ),
    "pretrain.py": (
        *("INPUT.SIZE", "32", "SOLVER.EPOCHS", "2", "SOLVER.BATCH_SIZE", "16"),
        *("DATA.NUM_WORKERS", "0", "METHOD.NUM_SHOTS", "2"),
    ),
    "linear_eval.py": ("INPUT.SIZE", "32", "INPUT.RESIZE", "32", "DATA.NUM_WORKERS", "0"),
    "convert.py": (),
    "train_net.py": (
        *("SOLVER.MAX_ITER", "2", "SOLVER.STEPS", "(1,)", "TEST.PRECISE_BN.NUM_ITER", "1"),
        *("MODEL.RPN.POST_NMS_TOPK_TEST", "20", "MODEL.ROI_HEADS.NUM_CLASSES", "5"),
    ),
    "leaderboard.py": (),
    "preflight.py": (),
    "run_suite.py": (),
    "visualize_basis.py": (),
    "plan.py": (),
}


def readme_commands() -> list[list[str]]:
    """The lines of every shell block, in order, without their comments."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.S)
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    return [shlex.split(line, comments=True) for line in lines]


def test_the_readme_s_make_targets_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    named = [words[1] for words in readme_commands() if words[0] == "make"]
    assert {"demo", "test"} <= set(named) <= set(targets)


def test_the_readme_s_commands_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setenv("KSCL_CACHE", str(tmp_path / "cache"))
    for name in ("tools", "configs", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    commands = [words for words in readme_commands() if words[0] != "make"]
    assert len(commands) >= 6
    for words in commands:
        assert words[0] == "python", words
        tool = Path(words[1]).name
        assert tool in SMOKE, f"say in this test how {tool} is made quick"
        done = run(sys.executable, "-W", "ignore", *words[1:], *SMOKE[tool], cwd=tmp_path)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
    board = (tmp_path / "output" / "leaderboard" / "leaderboard.md").read_text()
    assert "kscl" in board


@pytest.mark.parametrize("path", ["docs/flow.svg", "docs/shapes.png", "LICENSE", "CHANGELOG.md"])
def test_what_the_readme_shows_is_there(path):
    assert (ROOT / path).is_file()
