"""`make setup`: quick the second time, and clear about what it cannot use."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT, run

SCRIPT = ROOT / "tools" / "setup_environment.py"


def load_script():
    spec = importlib.util.spec_from_file_location("setup_environment", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_finished_set_up_is_recognized_in_under_five_seconds():
    venv = Path(sys.prefix)
    stamp = venv / "kscl-setup.stamp"
    if not stamp.exists() or stamp.read_text() != load_script().stamp_key(venv):
        pytest.skip("this environment was not made by `make setup` in this folder")
    start = time.perf_counter()
    done = run("make", "setup", f"VENV={sys.prefix}")
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 5
    assert "installing" not in done.stdout


def test_a_python_that_is_too_old_is_refused_before_anything_is_made(tmp_path):
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\necho 3 8\n")
    old.chmod(0o755)
    done = run(sys.executable, SCRIPT, "--venv", tmp_path / "venv", "--python", old)
    assert done.returncode == 1
    assert "is Python 3.8" in done.stderr
    assert "PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_python_that_does_not_run_is_named(tmp_path):
    done = run(sys.executable, SCRIPT, "--venv", tmp_path / "venv", "--python", tmp_path / "no")
    assert done.returncode == 1
    assert "does not run" in done.stderr


def test_a_folder_that_is_not_an_environment_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    done = run(sys.executable, SCRIPT, "--venv", tmp_path)
    assert done.returncode == 1
    assert "left alone" in done.stderr
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def start_offline(venv: Path) -> subprocess.Popen[str]:
    """Start a set-up that makes the environment and then finds no package index."""
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    return subprocess.Popen(
        [sys.executable, SCRIPT, "--venv", venv],
        env={**os.environ, **offline},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(process: subprocess.Popen[str], folder: Path, pattern: str) -> None:
    deadline = time.monotonic() + 120
    while not list(folder.glob(pattern)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.full
def test_a_set_up_killed_while_it_makes_the_environment_makes_it_again(tmp_path):
    venv = tmp_path / "missing" / "folders" / "venv"
    for moment in ("", "pyvenv.cfg", "bin/python", "lib/*/site-packages/pip", "bin/pip"):
        process = start_offline(venv)
        if moment == "":
            wait_for(process, venv.parent, venv.name)
        else:
            wait_for(process, venv, moment)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    (venv / "left-over").mkdir()
    output = start_offline(venv).communicate()[0]
    assert "making the environment again" in output
    assert "'installing setuptools' failed" in output
    assert "left alone" not in output
    assert not (venv / "left-over").exists()
    done = run(venv / "bin" / "python", "-m", "pip", "--version")
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_a_set_up_waits_for_what_a_killed_one_has_left_running(tmp_path):
    venv = tmp_path / "venv"
    killed = start_offline(venv)
    wait_for(killed, venv, "lib/*/site-packages/pip")  # made by a process of its own
    killed.kill()
    output = start_offline(venv).communicate()[0]
    killed.communicate()
    assert "another set-up of this environment is running" in output
    assert "making the environment again" in output
    assert run(venv / "bin" / "python", "-m", "pip", "--version").returncode == 0


def test_a_place_where_no_folder_can_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "venv", tmp_path / "file"):
        done = run(sys.executable, SCRIPT, "--venv", place)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert str(place) in done.stderr
        assert "VENV=" in done.stderr


@pytest.fixture
def script(monkeypatch):
    """The script as a module whose steps are written down instead of run."""
    module = load_script()
    steps: list[list[str]] = []
    monkeypatch.setattr(
        module, "run", lambda _, command: steps.append([str(word) for word in command])
    )
    monkeypatch.setattr(module, "steps", steps, raising=False)
    monkeypatch.setattr(module, "python_version", lambda _: (3, 11))
    monkeypatch.setattr(module.platform, "system", lambda: "Linux")
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    return module


def test_downloads_are_checked_by_hash_where_the_lock_file_holds(script):
    script.install_pins(["pip"], Path("python"))
    assert [("--require-hashes" in step) for step in script.steps] == [True, True]
    assert script.steps[-1][-1].endswith("requirements-lock.txt")
    assert "--no-build-isolation" in script.steps[-1]  # nothing is fetched beside the lock file


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("machine", lambda: "aarch64", "Linux aarch64"),
        ("system", lambda: "Darwin", "Darwin x86_64"),
        ("version", lambda _: (3, 14), "Python 3.14"),
    ],
)
def test_elsewhere_versions_are_pinned_and_the_missing_check_is_told(
    script, monkeypatch, capsys, name, value, told
):
    if name == "version":
        monkeypatch.setattr(script, "python_version", value)
    else:
        monkeypatch.setattr(script.platform, name, value)
    script.install_pins(["pip"], Path("python"))
    assert not any("--require-hashes" in step for step in script.steps)
    assert script.steps[-1][-1].endswith("requirements.txt")
    printed = capsys.readouterr().out
    assert told in printed
    assert "hashes are not checked" in printed


def test_a_package_is_cut_out_of_the_lock_file_with_its_hashes(script):
    text = (
        "a==1 \\\n    --hash=sha256:0\nb==2 \\\n    --hash=sha256:1 \\\n    --hash=sha256:2\nc==3\n"
    )
    assert script.entry_of("b", text) == "b==2 \\\n    --hash=sha256:1 \\\n    --hash=sha256:2\n"
    assert script.entry_of("c", text) == "c==3\n"
    with pytest.raises(script.SetupError, match="d is missing"):
        script.entry_of("d", text)


def pins_of(name: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / name).read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in found}


def test_the_lock_file_has_the_pinned_versions_and_a_hash_for_each():
    pins, locked = pins_of("requirements.txt"), pins_of("requirements-lock.txt")
    assert pins.items() <= locked.items(), "run `make lock`"
    entries = re.split(r"^(?=\w)", (ROOT / "requirements-lock.txt").read_text(), flags=re.MULTILINE)
    for entry in entries[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry.split()[0]


def test_the_lock_file_names_no_place():
    text = (ROOT / "requirements-lock.txt").read_text()
    assert not re.search(
        r"https?:|file:|--(extra-)?index|--find-links| @ |^[./]", text, re.MULTILINE
    )
