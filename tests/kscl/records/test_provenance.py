"""Where a number comes from, told in a checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kscl.records import provenance
from kscl.records.provenance import (
    PACKAGES,
    code_version,
    commit_of,
    library_versions,
    source_hash,
    source_hash_of,
)
from kscl.records.record import KINDS
from kscl.runtime.machine import hardware
from tests.helpers.commands import ROOT

PROBES = {"linear", "knn", "svm", "low_shot", "linear_suite", "finetune"}
# Which kinds of records can change when a file in a folder does. Every folder of code is listed, so
# that a new one is decided upon.
KINDS_CHANGED_BY = {
    "kscl": set(KINDS),
    "kscl/backbone_file": set(KINDS),
    "kscl/data": set(KINDS),
    "kscl/data/annotated": set(KINDS),
    "kscl/engine": set(KINDS),
    "kscl/engine/preview": set(KINDS),
    "kscl/methods": set(KINDS),
    "kscl/records": set(KINDS),
    "kscl/run": set(KINDS),
    "kscl/runtime": set(KINDS),
    "kscl/views": set(KINDS),
    "linear_eval": PROBES,
    "linear_eval/probes": PROBES,
    "detection": {"detection"},
    "detection/backbones": {"detection"},
    "detection/convert": {"detection"},
    "detection/data": {"detection"},
    "detection/scoring": {"detection"},
    "detection/train": {"detection"},
    "kscl/benchmark": set(),
    "kscl/benchmark/leaderboard": set(),
    "kscl/benchmark/leaderboard/page": set(),
    "kscl/benchmark/leaderboard/writing": set(),
    "kscl/benchmark/start": set(),
    "kscl/benchmark/slurm": set(),
    "kscl/benchmark/submission": set(),
    "kscl/benchmark/suite": set(),
    "kscl/commands": set(),
    "kscl/datasets": set(),
    "kscl/datasets/own": set(),
    "kscl/datasets/shapes": set(),
    "linear_eval/commands": set(),
    "detection/commands": set(),
}


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    command = ["git", *who, *words]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def committed(folder: Path) -> str:
    """Commit all that is in a folder; return the commit."""
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    return git(folder, "rev-parse", "HEAD")


def version_told_in(folder: Path) -> dict:
    """Return the code version that a new process tells whose packages are those of a folder."""
    program = (
        "import json; from kscl.records.provenance import code_version as v; print(json.dumps(v()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)


@pytest.fixture
def checkout(tmp_path):
    """A copy of the kscl package in a folder of its own."""
    ignored = shutil.ignore_patterns("__pycache__", "build_info.json")
    shutil.copytree(ROOT / "kscl", tmp_path / "kscl", ignore=ignored)
    return tmp_path


def test_a_process_tells_the_commit_of_its_code_and_whether_it_was_changed(checkout):
    commit = committed(checkout)
    clean = version_told_in(checkout)
    assert (clean["commit"], clean["dirty"]) == (commit, False)
    with (checkout / "kscl/methods/subspace.py").open("a") as file:
        file.write("# changed\n")
    changed = version_told_in(checkout)
    assert (changed["commit"], changed["dirty"]) == (commit, True)
    assert changed["source_hash"] != clean["source_hash"]


def test_what_is_edited_after_the_start_of_a_run_does_not_count(checkout):
    commit = committed(checkout)
    program = """
import json
from pathlib import Path
from kscl.records.provenance import code_version, loaded_code
loaded_code()
for name in ("subspace.py", "new.py"):
    with Path("kscl/methods", name).open("a") as file:
        file.write("# edited during the run")
print(json.dumps({kind: code_version(kind or None) for kind in ("pretrain", "")}))
"""
    before = {kind: source_hash_of(checkout, kind or None) for kind in ("pretrain", "")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        check=True,
        capture_output=True,
        text=True,
    )
    for kind, told in json.loads(done.stdout).items():
        assert told["source_hash"] == before[kind] != source_hash_of(checkout, kind or None)
        assert (told["commit"], told["dirty"]) == (commit, False)


class Reached(Exception):
    """The work of a run has begun."""


def engine(edit, monkeypatch):
    monkeypatch.setattr("kscl.run.engine.set_up_logging", edit)
    from kscl.run.engine import Flags, run

    run(None, Flags())


def probe(edit, monkeypatch):
    monkeypatch.setattr("kscl.run.engine.acquire", edit)
    from kscl.run.engine import Flags, run
    from linear_eval.probe import load_linear_eval_config, probe_of

    run(probe_of(load_linear_eval_config()), Flags())


def detect(edit, monkeypatch):
    monkeypatch.setattr("detection.train.trials.trial_configs", edit)
    from detection.train.trials import run_trials

    run_trials(SimpleNamespace(KSCL=SimpleNamespace(LR_GRID=[])), 1)


@pytest.mark.parametrize("start", [engine, detect])
def test_every_run_looks_at_its_code_before_it_begins(tmp_path, monkeypatch, start):
    file = tmp_path / "kscl" / "code.py"
    file.parent.mkdir()
    file.write_text("1\n")
    before = source_hash_of(tmp_path)

    def edit(*_, **__):
        file.write_text("2\n")
        raise Reached

    monkeypatch.setattr(provenance, "_home", lambda: tmp_path)
    provenance.loaded_code.cache_clear()
    try:
        with pytest.raises(Reached):
            start(edit, monkeypatch)
        assert source_hash() == before != source_hash_of(tmp_path)
    finally:
        provenance.loaded_code.cache_clear()


def test_code_that_is_neither_in_git_nor_installed_has_no_known_commit(checkout):
    told = version_told_in(checkout)
    assert (told["commit"], told["dirty"]) == (None, None)
    assert told["source_hash"] == source_hash_of(checkout)


def test_a_package_inside_somebody_elses_repository_does_not_take_its_commit(tmp_path):
    home = tmp_path / "site-packages"
    (home / "kscl").mkdir(parents=True)
    (home / "kscl/code.py").write_text("1\n")
    committed(tmp_path)
    assert commit_of(home) == (None, None)


def test_the_version_of_a_record_has_the_hash_of_its_kind():
    for kind in (None, *KINDS):
        assert code_version(kind)["source_hash"] == source_hash(kind) == source_hash_of(ROOT, kind)


def test_each_kind_of_record_has_the_hash_of_the_code_that_can_change_it():
    hashes = [source_hash(kind) for kind in ("pretrain", "linear", "detection", None)]
    assert len(set(hashes)) == 4
    assert source_hash("linear") == source_hash("knn")


def test_libraries_and_hardware_are_named():
    assert library_versions()["timm"]
    assert hardware()["memory_gib"] > 0


def test_code_is_changed_by_its_packages_and_by_no_document(tmp_path):
    source, document = tmp_path / "kscl" / "code.py", tmp_path / "RESULTS.md"
    source.parent.mkdir()
    source.write_text("1\n")
    document.write_text("one\n")
    commit = committed(tmp_path)
    document.write_text("two\n")
    assert commit_of(tmp_path) == (commit, False)
    source.write_text("2\n")
    assert commit_of(tmp_path) == (commit, True)
    source.write_text("1\n")
    (tmp_path / "kscl" / "new.py").write_text("")  # not even added
    assert commit_of(tmp_path) == (commit, True)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of all packages."""
    folder = tmp_path_factory.mktemp("tree")
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    return folder


def hashes_of(tree: Path) -> dict:
    return {kind: source_hash_of(tree, kind) for kind in (*KINDS, None)}


def test_it_is_decided_for_every_folder_of_code_whether_it_changes_numbers(tree):
    folders = {path.parent.relative_to(tree).as_posix() for path in tree.rglob("*.py")}
    assert folders == set(KINDS_CHANGED_BY)


@pytest.mark.parametrize("folder", KINDS_CHANGED_BY)
def test_an_edited_file_changes_the_hash_of_the_kinds_whose_numbers_it_can_change(tree, folder):
    before = hashes_of(tree)
    path = sorted((tree / folder).glob("*.py"))[-1]
    content = path.read_bytes()
    path.write_bytes(content + b"# edited\n")
    after = hashes_of(tree)
    path.write_bytes(content)
    changed = {kind for kind in before if before[kind] != after[kind]}
    assert changed == KINDS_CHANGED_BY[folder] | {None}
    assert hashes_of(tree) == before
