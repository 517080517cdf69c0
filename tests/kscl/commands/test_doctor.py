"""The doctor: green here, and able to say what is wrong where it is not."""

from __future__ import annotations

import json
import os
import venv

import pytest

from kscl.commands.doctor import main
from tests.helpers.commands import ROOT, run, tool


def doctor(folder, *flags):
    """Run the doctor where the modules of a folder stand before those installed."""
    return tool("doctor", *flags, env={"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"})


def test_the_doctor_is_green_here_in_json_and_as_a_table(capsys):
    assert main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"]
    marks = {finding["what"]: finding["mark"] for finding in report["findings"]}
    assert {"cores", "memory", "disk free here"} <= marks.keys()
    needed = ("Python", "torch", "timm", "Detectron2")
    assert {marks[name] for name in needed} == {"ok"}
    assert main([]) == 0
    *rows, verdict = capsys.readouterr().out.splitlines()
    assert "Everything needed is here" in verdict
    assert {("ok", name) for name in needed} <= {tuple(row.split()[:2]) for row in rows}


@pytest.mark.full
@pytest.mark.parametrize("compiled", [False, True])
def test_the_doctor_says_what_the_missing_compiled_part_costs(tmp_path, compiled):
    package = tmp_path / "detectron2"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.0'")
    (package / "modeling.py").touch()
    if compiled:
        (package / "_C.py").touch()
    findings = json.loads(doctor(tmp_path, "--json").stdout)["findings"]
    (finding,) = [it for it in findings if it["what"] == "Detectron2 compiled"]
    assert finding["mark"] == ("ok" if compiled else "note")
    assert ("deformable" in finding["value"]) == (not compiled)
    assert ("--from-source" in finding["fix"]) == (not compiled)


def test_a_broken_library_is_a_problem_with_its_fix_and_exit_code_1(tmp_path):
    package = tmp_path / "detectron2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('half of it is missing')")
    done = doctor(tmp_path)
    assert done.returncode == 1
    problem, fix = (line.strip() for line in done.stdout.split("PROBLEM")[1].splitlines()[:2])
    assert problem.startswith("Detectron2")
    assert "half of it is missing" in problem
    assert fix.startswith("→")
    assert "kscl install-detectron2" in fix


@pytest.mark.full
def test_the_doctor_needs_none_of_the_libraries_it_looks_for(tmp_path):
    missing = ("torch", "torchvision", "fvcore", "yaml", "packaging", "tqdm", "timm", "tabulate")
    for name in missing:
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')")
    done = doctor(tmp_path)
    assert done.returncode == 1
    assert "PROBLEM" in done.stdout
    assert "Traceback" not in done.stderr


def test_make_doctor_sets_nothing_up_and_says_what_is_missing(tmp_path):
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=False)
    before = sorted(tmp_path.rglob("*"))
    done = run("make", "doctor", f"VENV={tmp_path / 'none'}", f"PYTHON={bare / 'bin/python'}")
    assert done.returncode != 0
    assert "PROBLEM  torch" in done.stdout
    assert "make setup" in done.stdout
    assert sorted(tmp_path.rglob("*")) == before
