"""`pip install .` is useful outside the repository: configs, entry points, code version."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT, run

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The package built from a git checkout and installed into a folder of its own."""
    source = tmp_path_factory.mktemp("source") / "kscl"
    skip = shutil.ignore_patterns(
        ".venv", ".git", "*.egg-info", "__pycache__", "output", "datasets"
    )
    shutil.copytree(ROOT, source, ignore=skip)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        assert run("git", *identity, *words, cwd=source).returncode == 0
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    done = run(*pip, "--target", target, source)
    assert done.returncode == 0, done.stderr
    return target


def python(site: Path, code: str, cwd: Path) -> str:
    done = run(sys.executable, "-W", "ignore", "-c", code, cwd=cwd, env={"PYTHONPATH": str(site)})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_configs_are_reachable_and_tools_is_not_installed(site, tmp_path):
    code = (
        "import kscl.keys as c; print(c.__file__); "
        "print(c.load_config('pretrain/moco_v2_r50_200ep.yaml').LABEL)"
    )
    where, name = python(site, code, tmp_path).splitlines()
    assert Path(where).is_relative_to(site)
    assert name == "moco_v2"
    assert not (site / "tools").exists()
    assert not (site / "tests").exists()


def test_the_commit_it_was_built_from_travels_along(site, tmp_path):
    code = "import json, kscl.records.provenance as p; print(json.dumps(p.code_version()))"
    version = json.loads(python(site, code, tmp_path))
    assert len(version["commit"]) == 40
    assert version["dirty"] is False


def test_a_file_changed_after_installation_makes_it_dirty(site, tmp_path):
    file = site / "kscl" / "errors.py"
    before = file.read_text()
    file.write_text(before + "\n# changed\n")
    try:
        code = "import kscl.records.provenance as p; print(p.code_version()['dirty'])"
        assert python(site, code, tmp_path) == "True"
    finally:
        file.write_text(before)


def test_one_command_runs_everything_that_is_installed(site, tmp_path):
    (info,) = site.glob("kscl-*.dist-info")
    lines = (info / "entry_points.txt").read_text().splitlines()
    assert [line for line in lines if " = " in line] == ["kscl = kscl.main:main"]
    code = (
        "import importlib, kscl.main as main\n"
        "for verb in main.VERBS.values():\n"
        "    module = importlib.import_module(verb.module)\n"
        "    assert callable(module.main)\n"
        "    print(module.__file__)\n"
    )
    for path in python(site, code, tmp_path).splitlines():
        assert Path(path).is_relative_to(site)


def test_the_demo_is_planned_in_an_empty_folder(site, tmp_path):
    words = [sys.executable, "-P", "-m", "kscl", "demo", "--print-commands"]
    done = run(*words, cwd=tmp_path, env={"PYTHONPATH": str(site)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("kscl shapes --output-dir datasets/shapes")
    assert done.stdout.splitlines()[-1].startswith("kscl board ")
