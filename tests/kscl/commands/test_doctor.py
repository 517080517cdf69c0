"""The doctor: green here, and able to say what is wrong where it is not."""

from __future__ import annotations

import json

from tests.helpers.commands import tool


def test_the_doctor_is_green_here_and_speaks_json():
    done = tool("doctor", "--json")
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    assert report["healthy"]
    named = {finding["what"] for finding in report["findings"]}
    assert {"Python", "torch", "timm", "Detectron2", "cores", "memory", "disk free here"} <= named


def test_the_doctor_says_what_the_missing_compiled_part_costs():
    done = tool("doctor")
    assert "Detectron2 compiled" in done.stdout
    assert "everything needed is here" in done.stdout


def test_a_broken_library_is_a_problem_with_its_fix_and_exit_code_1(tmp_path):
    package = tmp_path / "detectron2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('half of it is missing')")
    done = tool("doctor", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "PROBLEM  Detectron2" in done.stdout
    assert "half of it is missing" in done.stdout
    assert "→ kscl-install-detectron2" in done.stdout


def test_the_doctor_needs_none_of_the_libraries_it_looks_for(tmp_path):
    for name in ("torch", "torchvision", "fvcore", "yaml", "packaging", "tqdm", "timm"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')")
    done = tool("doctor", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "PROBLEM" in done.stdout
    assert "Traceback" not in done.stderr
