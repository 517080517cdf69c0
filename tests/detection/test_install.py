"""Installing Detectron2: only the file that was checked, or nothing at all."""

from __future__ import annotations

import sys
import zipfile

import pytest

from detection import install
from detection.install import main
from tests.helpers.commands import ROOT, run


@pytest.fixture
def carrier(tmp_path, monkeypatch):
    """A small wheel built like the real one: the package, a compiled part, a `tools` package."""
    path = tmp_path / "carrier.whl"
    info = f"sal_detectron2-{install.CARRIER_VERSION}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("detectron2/__init__.py", "__version__ = 'test'\n")
        wheel.writestr("detectron2/modeling/__init__.py", "")
        wheel.writestr("detectron2/_C.cpython-310-x86_64-linux-gnu.so", b"\x7fELF")
        wheel.writestr("tools/__init__.py", "")
        wheel.writestr(f"{info}/LICENSE", "Apache")
        wheel.writestr(f"{info}/METADATA", "Name: sal-detectron2\n")
    return path


def test_the_repacked_wheel_installs_its_python_part_and_says_which_commit_it_is(carrier, tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    wheel = install.repack(carrier, tmp_path)
    assert run(*pip, "--target", tmp_path / "site", wheel).returncode == 0
    installed = {p.name for p in (tmp_path / "site").iterdir()}
    assert "detectron2" in installed
    assert "tools" not in installed
    assert not list((tmp_path / "site").rglob("_C*"))

    (info,) = (tmp_path / "site").glob("detectron2-*.dist-info")
    text = (info / "METADATA").read_text()
    assert "Name: detectron2\n" in text
    assert "upstream commit a59f0563" in text
    assert install.CARRIER_SHA256 in text
    assert "numpy<2" not in text


def test_repacking_is_reproducible_to_the_byte(carrier, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    one, two = (install.repack(carrier, tmp_path / name) for name in ("a", "b"))
    assert one.read_bytes() == two.read_bytes()


def test_a_wrong_hash_is_an_error_and_the_environment_stays(carrier, capsys):
    assert main(["--force", "--wheel", str(carrier)]) == 2
    errors = capsys.readouterr().err
    assert "expected sha256" in errors
    assert "nothing was installed" in errors
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("Kept: ")


def test_a_wheel_that_is_not_there_is_an_error(tmp_path, capsys):
    assert main(["--force", "--wheel", str(tmp_path / "none.whl")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_no_network_is_an_error_that_says_what_to_do(monkeypatch, capsys):
    nowhere = {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "0",
        "PIP_NO_CACHE_DIR": "1",
    }
    for name, value in nowhere.items():
        monkeypatch.setenv(name, value)
    assert main(["--force"]) == 2
    errors = capsys.readouterr().err
    assert "could not be downloaded" in errors
    assert "--wheel FILE" in errors


def test_an_unwritable_folder_is_an_error(carrier, tmp_path, monkeypatch):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    monkeypatch.setenv("PIP_TARGET", str(blocked / "site"))
    with pytest.raises(ValueError, match="could not install"):
        install.install_wheel(install.repack(carrier, tmp_path))


WITHOUT_DETECTRON2 = "import sys; sys.modules['detectron2'] = None\n"  # as if not installed


def test_where_detectron2_is_missing_the_hint_says_how_to_install_it():
    code = "from detection import require_detectron2; require_detectron2()"
    done = run(sys.executable, "-c", WITHOUT_DETECTRON2 + code)
    assert done.returncode == 1
    assert "kscl install-detectron2" in done.stderr


def test_tools_that_need_no_detectron2_run_without_it():
    code = "import detection.install\n"
    code += "".join(
        f"from detection.commands.{command} import main as {command}\n"
        for command in ("preflight", "score")
    )
    code += "assert 'torch' not in sys.modules\nscore(['--help'])"
    done = run(sys.executable, "-W", "ignore", "-c", WITHOUT_DETECTRON2 + code)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_an_import_error_of_an_installed_detectron2_is_not_suppressed(tmp_path):
    (tmp_path / "detectron2").mkdir()
    (tmp_path / "detectron2" / "__init__.py").write_text("")
    (tmp_path / "detectron2" / "config.py").write_text("raise ImportError('half an installation')")
    path = f"{tmp_path}:{ROOT}"
    done = run(sys.executable, "-c", "import detection", env={"PYTHONPATH": path})
    assert done.returncode == 1
    assert "half an installation" in done.stderr


def test_ctrl_c_while_detectron2_is_imported_ends_without_a_traceback(tmp_path):
    package = tmp_path / "detectron2"
    package.mkdir()
    package.joinpath("__init__.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = run(sys.executable, "-c", "import detection", env=env)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    at_a_prompt = "import sys; sys.ps1 = '>>> '\ntry: import detection\n"
    at_a_prompt += "except KeyboardInterrupt: print('caught')"
    done = run(sys.executable, "-c", at_a_prompt, env=env)
    assert (done.returncode, done.stdout) == (0, "caught\n")
