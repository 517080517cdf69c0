"""Which code made a number: its commit, and a hash that follows the meaning of the code."""

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
    commit_of,
    hash_of_closure,
    library_versions,
    plug_in_sources,
    read_sources,
    source_hash,
)
from kscl.runtime.machine import hardware
from tests.helpers.commands import ROOT

TASKS = ("kscl.engine.pretrain", "linear_eval.probes.knn", "detection.train.detect")
SOURCES = read_sources(ROOT)


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


def told_in(folder: Path, edit: str = "") -> dict:
    """Return the version and hash that a new process tells whose packages are those of a folder."""
    program = f"""
import json
from pathlib import Path
from kscl.records.provenance import code_version, loaded_code, source_hash
loaded_code()
{edit}
print(json.dumps(code_version() | {{"hash": source_hash(["kscl.methods.subspace"])}}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
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
    unknown = told_in(checkout)
    assert (unknown["commit"], unknown["dirty"]) == (None, None)
    commit = committed(checkout)
    edit = "Path('kscl/methods/subspace.py').write_text('edited = True')"
    clean = told_in(checkout, edit)  # what is edited after the start does not count
    assert clean == unknown | {"commit": commit, "dirty": False}
    changed = told_in(checkout)
    assert (changed["commit"], changed["dirty"]) == (commit, True)
    assert changed["hash"] != clean["hash"]


class Reached(Exception):
    """The work of a run has begun."""


def engine(edit, monkeypatch):
    monkeypatch.setattr("kscl.run.engine.set_up_logging", edit)
    from kscl.run.engine import Flags, run

    run(None, Flags())


def detect(edit, monkeypatch):
    monkeypatch.setattr("detection.train.trials.seed_configs", edit)
    from detection.train.trials import run_trials

    run_trials(SimpleNamespace(KSCL=SimpleNamespace(LR_GRID=[])), 1)


@pytest.mark.parametrize("start", [engine, detect])
def test_every_run_looks_at_its_code_before_it_begins(tmp_path, monkeypatch, start):
    file = tmp_path / "kscl" / "code.py"
    file.parent.mkdir()
    file.write_text("1\n")
    before = hash_of_closure(["kscl.code"], read_sources(tmp_path))

    def edit(*_, **__):
        file.write_text("2\n")
        raise Reached

    monkeypatch.setattr(provenance, "_home", lambda: tmp_path)
    provenance.loaded_code.cache_clear()
    try:
        with pytest.raises(Reached):
            start(edit, monkeypatch)
        assert source_hash(["kscl.code"]) == before
    finally:
        provenance.loaded_code.cache_clear()


def test_a_package_inside_somebody_elses_repository_does_not_take_its_commit(tmp_path):
    home = tmp_path / "site-packages"
    (home / "kscl").mkdir(parents=True)
    (home / "kscl/code.py").write_text("1\n")
    committed(tmp_path)
    assert commit_of(home) == (None, None)


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


def changed_by(module: str, more: bytes = b"\nedited = True\n") -> set[str]:
    """Return the tasks whose hash an edit of a module changes."""
    edited = SOURCES | {module: SOURCES[module] + more}
    return {
        task
        for task in TASKS
        if hash_of_closure([task], SOURCES) != hash_of_closure([task], edited)
    }


@pytest.mark.parametrize(
    ("module", "tasks"),
    [
        ("kscl", TASKS),
        ("kscl.run.engine", TASKS),
        ("kscl.data.source", TASKS),
        ("linear_eval.features", TASKS[1:2]),
        ("linear_eval.probes.svm", ()),  # another probe, which a registry loads by name
        ("detection.scoring.voc07", TASKS[2:]),
        ("kscl.benchmark.leaderboard.rows", ()),
        ("kscl.commands.pretrain", ()),
        ("kscl.datasets.public", ()),
    ],
)
def test_the_hash_of_a_task_covers_what_its_module_imports(module, tasks):
    assert changed_by(module) == set(tasks)


def test_rewording_changes_no_hash_and_any_other_edit_does():
    source = b'"""One."""\n\ndef f(a):  # why\n    """Two."""\n    return a + 1\n'
    reworded = b'"""Other."""\n\n\ndef f(\n    a,\n):\n    """Words."""\n    return a + 1  # so\n'

    def of(text: bytes) -> str | None:
        return hash_of_closure(["m"], {"m": text})

    assert of(source) == of(reworded)
    for one, other in ((b"+ 1", b"+ 2"), (b"+ 1", b"- 1"), (b"f(a)", b"f(b)"), (b"a + 1", b"'a'")):
        assert of(source) != of(source.replace(one, other))


def test_a_plug_in_counts_with_what_is_beside_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text("import beside\nimport kscl.rng\n")
    (tmp_path / "beside.py").write_text("x = 1\n")

    def now() -> str | None:
        return hash_of_closure(["mine"], SOURCES | plug_in_sources(["mine"]))

    before = now()
    (tmp_path / "beside.py").write_text("x = 2\n")
    assert before != now()
    assert source_hash(["not_on_this_machine"]) is None
