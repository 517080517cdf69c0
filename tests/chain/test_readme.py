"""Every command of the README runs, in its order, on smoke-sized settings."""

from __future__ import annotations

import re
import shlex
import shutil
import sys

import pytest

from kscl.main import VERBS, python_words
from tests.helpers import result_pages
from tests.helpers.commands import ROOT, run

# What makes each command quick; everything else is as the README has it.
SMOKE = {
    "shapes": (
        *("--num-classes", "5", "--unlabeled", "32", "--train", "30", "--val", "20"),
        *("--detection-train", "8", "--detection-test", "4", "--image-size", "48"),
        *("--detection-size", "64", "--min-objects", "5", "--workers", "1"),
    ),
    "pretrain": (
        *("INPUT.SIZE", "32", "SOLVER.EPOCHS", "2", "SOLVER.BATCH_SIZE", "16"),
        *("DATA.NUM_WORKERS", "0", "METHOD.NUM_SHOTS", "2"),
    ),
    "probe": ("INPUT.SIZE", "32", "INPUT.RESIZE", "32", "DATA.NUM_WORKERS", "0"),
    "convert": (),
    "train-net": (
        *("SOLVER.MAX_ITER", "2", "SOLVER.STEPS", "(1,)", "TEST.PRECISE_BN.NUM_ITER", "1"),
        *("MODEL.RPN.POST_NMS_TOPK_TEST", "20", "MODEL.ROI_HEADS.NUM_CLASSES", "5"),
    ),
    "board": (),
    "preflight": (),
    "run": ("--skip-check",),  # tests/kscl/benchmark/suite/test_check.py checks
    "visualize basis": (),
    "plan": (),
}


# What the README says that its Python computes: shapes, and lengths that are cosines.
CHECK = """
assert lengths.shape == (8, 8) and owner.shape == (8,)
assert 0 <= lengths.min() and lengths.max() <= 1 + 1e-5
assert (lengths.argmax(1) == owner).all()
"""


def readme_commands() -> list[list[str]]:
    """The lines of every shell block, in order, without their comments."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.S)
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("index.md", "The same seed gives the same numbers on the same machine; another CPU"),
        ("probes.md", "Detectron2's own VOC numbers depend on the CPU"),
    ],
)
def test_the_docs_say_which_numbers_depend_on_the_cpu(page, sentence):
    assert sentence in " ".join((ROOT / "docs" / page).read_text().split())


def test_the_readme_can_be_read_in_two_minutes():
    text = (ROOT / "README.md").read_text()
    assert 110 <= len(text.splitlines()) <= 130
    tables = re.findall(r"^\|.*\|$", text, re.M)
    assert max(row.count("|") - 1 for row in tables) <= 7


def test_every_verb_is_named_in_the_docs():
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert [verb for verb in VERBS if f"kscl {verb}" not in pages] == []


def test_the_readme_s_make_targets_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    named = [words[1] for words in readme_commands() if words[0] == "make"]
    assert {"demo", "test"} <= set(named) <= set(targets)


@pytest.mark.full
def test_the_readme_s_commands_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setenv("KSCL_CACHE", str(tmp_path / "cache"))
    for name in ("configs", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    commands = [words for words in readme_commands() if words[0] != "make"]
    assert len(commands) >= 6
    for words in commands:
        assert words[0] == "kscl", words
        verb = words[1] if words[1] in VERBS else " ".join(words[1:3])
        assert verb in SMOKE, f"say in this test how {verb} is made quick"
        done = run(*python_words(*words[1:]), *SMOKE[verb], cwd=tmp_path)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
    board = (tmp_path / "output" / "leaderboard" / "leaderboard.md").read_text()
    assert "kscl" in board


def test_every_table_is_what_the_records_give(tmp_path):
    for path in ("README.md", "RESULTS.md", "docs/results"):
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        (tmp_path / path).parent.mkdir(exist_ok=True)
        copy(ROOT / path, tmp_path / path)
    result_pages.write(tmp_path)
    for table in (*result_pages.TABLES, *result_pages.BOARDS):
        made, committed = (root / table.document for root in (tmp_path, ROOT))
        assert made.read_text() == committed.read_text(), table.document


@pytest.mark.parametrize("table", result_pages.TABLES, ids=lambda it: it.mark)
def test_what_is_said_below_a_table_has_numbers_of_its_board(table):
    """Means, their differences, intervals and whatever else the board has."""
    text = (ROOT / table.document).read_text()
    ((shown, said),) = re.findall(
        rf"<!-- board {table.mark} -->(.*?)<!-- end .*? -->(.*?)(?:^!\[|^#|<!--)", text, re.S | re.M
    )
    means = [float(mean) for mean in re.findall(r"(\d+\.\d\d) ±", shown)]
    known = {f"{value:.1f}" for one in means for value in (one, *(abs(one - two) for two in means))}
    known |= set(re.findall(r"\d+\.\d+", result_pages.whole(table.submission)))
    assert set(re.findall(r"\d+\.\d+", said)) <= known


def linked_files() -> list[str]:
    """Every file that a document at the top shows, links to or names (`make docs` checks docs/)."""
    found = set()
    for name in ("README.md", "CONTRIBUTING.md", "RESULTS.md"):
        text = (ROOT / name).read_text()
        found |= set(re.findall(r"\]\((?!http)([^)#]+)\)", text))
        found |= set(
            re.findall(r"`((?:kscl|detection|linear_eval|tools|configs|tests|docs)/[^`\s]*)`", text)
        )
    return sorted(path for path in found if not re.search(r"[<>*{}]", path))


@pytest.mark.parametrize("path", linked_files())
def test_what_the_documents_link_to_is_there(path):
    assert (ROOT / path).exists()


@pytest.mark.full
def test_the_readme_s_python_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert blocks
    for block in blocks:
        assert len([line for line in block.splitlines() if line.strip()]) <= 10
        done = run(sys.executable, "-W", "ignore", "-c", block + CHECK, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
