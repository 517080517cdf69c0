"""Another package with the name of one of ours is named; messages of libraries reach nobody."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest

from kscl.runtime.startup import hidden_packages, mixed_packages
from tests.helpers.commands import ROOT, run

DOCTOR = "import sys; from kscl.commands.doctor import main; sys.exit(main(['--json']))"


@pytest.fixture
def copy(tmp_path):
    """The packages in a folder of their own, and a function that runs Python on them."""
    for name in ("kscl", "detection", "linear_eval"):
        shutil.copytree(ROOT / name, tmp_path / name)
    options = {"env": {"PYTHONPATH": str(tmp_path)}, "cwd": tmp_path}
    return tmp_path, lambda code: run(sys.executable, "-c", code, **options)


def problems(report: str) -> dict[str, str]:
    """Return what the doctor calls a problem."""
    found = json.loads(report)["findings"]
    return {it["what"]: it["value"] for it in found if it["mark"] == "PROBLEM"}


def test_nothing_hides_our_packages_here():
    assert [*hidden_packages(), *mixed_packages()] == []


@pytest.mark.full
def test_a_package_that_was_written_over_one_of_ours_is_named_at_import_and_by_the_doctor(copy):
    folder, python = copy
    theirs = folder / "detection/__init__.py"
    theirs.write_text('"""Detect anything."""\n')
    done = python("import kscl")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning") == 1
    assert str(theirs) in done.stderr
    assert str(theirs) in problems(python(DOCTOR).stdout)["detection"]


@pytest.mark.full
def test_a_package_that_hides_one_of_ours_is_named_at_import_and_by_the_doctor(tmp_path):
    theirs = tmp_path / "detection"
    theirs.mkdir()
    (theirs / "__init__.py").touch()
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "default"}
    done = run(sys.executable, "-m", "kscl", "doctor", "--json", env=environment, cwd=tmp_path)
    assert str(theirs) in done.stderr
    assert str(theirs) in problems(done.stdout)["detection"]


@pytest.mark.full
def test_a_wheel_that_was_installed_into_a_package_of_ours_is_named_by_the_doctor(copy):
    folder, python = copy
    theirs = folder / "other-1.0.dist-info"
    theirs.mkdir()
    (theirs / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (theirs / "RECORD").write_text("detection/__init__.py,,\ndetection/boxes.py,,\n")
    found = problems(python(DOCTOR).stdout)
    assert "package other " in found["detection"]
    assert "linear_eval" not in found
    (theirs / "RECORD").write_text("their_detection/__init__.py,,\n")
    code = "from kscl.runtime.startup import mixed_packages; print(*mixed_packages())"
    assert python(code).stdout == "\n"


def test_a_tool_of_another_checkout_is_not_taken_for_a_package(tmp_path):
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    environment = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default::RuntimeWarning"}
    done = run(sys.executable, tmp_path / "tools/score.py", "--help", env=environment)
    assert done.returncode == 0, done.stderr
    assert "linear_eval" not in done.stderr


# A spawned rank knows only what it imports itself.
PROGRAM = """
import multiprocessing

def provoke():
    import logging, warnings
    import kscl
    from torch.utils.data import DataLoader
    DataLoader([0], num_workers=4000)
    logger = logging.getLogger("torch.fx._symbolic_trace")
    try:
        from torch.fx._symbolic_trace import is_fx_tracing
    except ImportError:
        pass
    else:
        is_fx_tracing()
    logger.warning("another message of the tracer")
    warnings.warn("another warning")

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=provoke)
    process.start()
    process.join()
    provoke()
"""


@pytest.mark.full
def test_worker_counts_and_tracing_are_shown_in_no_process_and_the_rest_is(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default::UserWarning"}
    done = run(sys.executable, tmp_path / "program.py", env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "worker processes" not in done.stderr
    assert "is_fx_tracing" not in done.stderr
    assert done.stderr.count("another message of the tracer") == 2
    assert done.stderr.count("UserWarning: another warning") == 2
