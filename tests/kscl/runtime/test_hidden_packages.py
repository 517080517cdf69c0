"""Another package with the name of one of ours is named, not met as a missing module."""

from __future__ import annotations

import json
import os
import shutil
import sys

from kscl.runtime.startup import hidden_packages, mixed_packages, overwritten_packages
from tests.helpers.commands import ROOT, run, tool


def test_nothing_hides_our_packages_here():
    assert hidden_packages() == {}
    assert mixed_packages() == {}
    assert overwritten_packages() == {}


def test_a_package_that_was_written_over_one_of_ours_is_named_at_import_and_by_the_doctor(tmp_path):
    for name in ("kscl", "detection", "linear_eval"):
        shutil.copytree(ROOT / name, tmp_path / name)
    theirs = tmp_path / "detection/__init__.py"
    theirs.write_text('"""Detect anything."""\n')
    options = {"env": {"PYTHONPATH": str(tmp_path)}, "cwd": tmp_path}
    done = run(sys.executable, "-c", "import kscl", **options)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning") == 1
    assert f"{theirs} is not this project's" in done.stderr
    doctor = "import sys; from kscl.commands.doctor import main; sys.exit(main(['--json']))"
    done = run(sys.executable, "-c", doctor, **options)
    found = {it["what"]: it for it in json.loads(done.stdout)["findings"]}
    assert found["detection"]["mark"] == "PROBLEM"
    assert str(theirs) in found["detection"]["value"]


def test_a_package_that_hides_one_of_ours_is_named_at_import_and_by_the_doctor(tmp_path):
    theirs = tmp_path / "detection"
    theirs.mkdir()
    (theirs / "__init__.py").touch()
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "default"}
    script = ROOT / "tools/train_net.py"
    done = run(sys.executable, script, "--help", env=environment)
    assert str(theirs) in done.stderr  # whether the import then fails depends on the installation
    done = tool("doctor", "--json", env=environment)
    found = {it["what"]: it for it in json.loads(done.stdout)["findings"]}
    assert found["detection"]["mark"] == "PROBLEM"
    assert str(theirs) in found["detection"]["value"]


def test_a_wheel_that_was_installed_into_a_package_of_ours_is_named_by_the_doctor(tmp_path):
    for name in ("kscl", "detection", "linear_eval"):
        shutil.copytree(ROOT / name, tmp_path / name)
    theirs = tmp_path / "other-1.0.dist-info"
    theirs.mkdir()
    (theirs / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (theirs / "RECORD").write_text("detection/__init__.py,,\ndetection/boxes.py,,\n")
    doctor = "import sys; from kscl.commands.doctor import main; sys.exit(main(['--json']))"
    done = run(sys.executable, "-c", doctor, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    found = {it["what"]: it for it in json.loads(done.stdout)["findings"]}
    assert found["detection"]["mark"] == "PROBLEM"
    assert "package other " in found["detection"]["value"]
    assert "linear_eval" not in found
    (theirs / "RECORD").write_text("their_detection/__init__.py,,\n")
    found = "from kscl.runtime.startup import mixed_packages; print(mixed_packages())"
    done = run(sys.executable, "-c", found, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert done.stdout == "{}\n"


def test_a_tool_of_another_checkout_is_not_taken_for_a_package(tmp_path):
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    environment = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default::RuntimeWarning"}
    done = run(sys.executable, tmp_path / "tools/score.py", "--help", env=environment)
    assert done.returncode == 0, done.stderr
    assert "linear_eval" not in done.stderr
