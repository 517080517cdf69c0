"""Make the environment: `make setup` runs this with a bare Python, so it needs nothing installed.

A stamp in the environment remembers what was installed from which pins; while it matches there is
nothing to do. It is written last. An environment whose set-up was killed is made again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = "kscl-setup.stamp"
MADE_BY_US = "kscl-made-this-environment"
UNFINISHED = "unfinished"  # what that file says while the environment is made and filled
OLDEST_PYTHON = (3, 11)
LOCK, PINS = "requirements-lock.txt", "requirements.txt"
LOCKED_PYTHONS = ((3, 11), (3, 12), (3, 13))
DECIDES_WHAT_IS_INSTALLED = (
    PINS,
    LOCK,
    "pyproject.toml",
    "setup.py",
    "detection/install.py",
    "tools/setup_environment.py",
)

PROOF = """
import cv2, detectron2, fvcore, iopath, timm, torch, torchvision
import detection, kscl, linear_eval
from detectron2.layers import ROIAlign
features = timm.create_model("resnet18", num_classes=0)(torch.zeros(1, 3, 64, 64))
pooled = ROIAlign((2, 2), 1.0, 0)(torch.ones(1, 1, 8, 8), torch.tensor([[0.0, 0, 0, 8, 8]]))
assert features.shape == (1, 512) and pooled.shape == (1, 1, 2, 2)
print(f"    torch {torch.__version__}, timm {timm.__version__}, one forward pass: fine")
"""


class SetupError(Exception):
    """Something the user can fix."""


class StepError(SetupError):
    """A step that ended by itself, with an exit code, and left nothing half-made."""


def say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


def python_of(venv: Path) -> Path:
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def stamp_key(venv: Path) -> str:
    """Return a hash of the pins, the installers and the two folders."""
    digest = hashlib.sha256(f"{ROOT}\n{venv}\n".encode())
    for name in DECIDES_WHAT_IS_INSTALLED:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def run(step: str, command: list[str | Path]) -> None:
    say(step)
    start = time.monotonic()
    # Children keep the lock's handle: one that outlives a killed set-up still holds the lock.
    done = subprocess.run([str(part) for part in command], cwd=ROOT, close_fds=False)
    if done.returncode:
        error = StepError if done.returncode > 0 else SetupError
        raise error(
            f"'{step}' failed (exit code {done.returncode}); the lines above say why.\n"
            "        Fix it and run `make setup` again: what was downloaded is kept."
        )
    say(f"    {time.monotonic() - start:.0f} s")


def python_version(python: str | Path) -> tuple[int, int]:
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(
            f"{python} does not run: {error}. Pass another with PYTHON=/path."
        ) from error
    major, minor = done.stdout.split()
    return int(major), int(minor)


def works(python: Path) -> bool:
    """Return whether this Python starts and has pip."""
    command = [python, "-m", "pip", "--version"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def make_venv(venv: Path, python: str) -> None:
    version = python_version(python)
    if version < OLDEST_PYTHON:
        raise SetupError(
            f"{python} is Python {version[0]}.{version[1]}; the pinned versions need "
            f"{OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or later. Pass one with PYTHON=/path/to/it."
        )
    venv.mkdir(parents=True, exist_ok=True)
    (venv / MADE_BY_US).write_text(UNFINISHED)
    for entry in venv.iterdir():  # not `venv --clear`, which would remove our note as well
        if entry.name == MADE_BY_US:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    run(f"making the environment {venv}", [python, "-m", "venv", venv])


@contextlib.contextmanager
def only_one_setup(venv: Path) -> Iterator[None]:
    """Hold a lock beside the environment: two set-ups would write into the same site-packages."""
    with contextlib.ExitStack() as stack:
        try:
            import fcntl

            venv.parent.mkdir(parents=True, exist_ok=True)
            lock = venv.with_name(f".{venv.name}.setup.lock")
            handle = stack.enter_context(lock.open("w"))
            os.set_inheritable(handle.fileno(), True)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another set-up of this environment is running; waiting for it")
                fcntl.flock(handle, fcntl.LOCK_EX)
        except (ImportError, OSError) as error:
            if not venv.parent.is_dir():
                raise  # there is no place for the environment either
            say(f"no lock can be held here ({error}): run one set-up at a time")
        yield


def install(venv: Path) -> None:
    note = venv / MADE_BY_US
    ours = note.exists()
    python = python_of(venv)
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    if ours:
        note.write_text(UNFINISHED)
        install_pins(pip, python)
    else:
        say(f"{venv} is your own environment: what is there and is in range is kept")
    try:
        if ours:
            here = ["--no-deps", "--no-build-isolation", "-e", ROOT]
            run("installing the project", [*pip, *here])
        else:
            run("installing the project and what is missing", [*pip, "-e", f"{ROOT}[dev]"])
        run("installing Detectron2", [python, ROOT / "tools" / "install_detectron2.py"])
        run("proving it: imports and one forward pass", [python, "-W", "ignore", "-c", PROOF])
    except StepError:
        if ours:
            note.write_text("")  # the pins are installed: the next set-up resumes from here
        raise
    if ours:
        note.write_text("")


def install_pins(pip: list[str | Path], python: Path) -> None:
    """Install the lock file by its hashes where it was made for, else the pinned versions.

    Three packages come as source only. The setuptools that builds them and the project is one of
    the pins and comes first, so that pip fetches none of its own.
    """
    version = python_version(python)
    system = f"{platform.system()} {platform.machine()}"
    locked = system == "Linux x86_64" and version in LOCKED_PYTHONS
    if locked:
        say(f"every download is checked by its hash ({LOCK})")
    else:
        pythons = ", ".join(f"{major}.{minor}" for major, minor in LOCKED_PYTHONS)
        say(
            f"{LOCK} holds for Linux x86_64 and Python {pythons}; this is {system} and Python "
            f"{version[0]}.{version[1]}: versions are pinned ({PINS}), hashes are not checked"
        )
    pins = ROOT / (LOCK if locked else PINS)
    pip = [*pip, "--require-hashes"] if locked else pip
    with tempfile.TemporaryDirectory() as folder:
        builder = Path(folder) / "setuptools.txt"
        builder.write_text(entry_of("setuptools", pins.read_text()))
        run("installing setuptools", [*pip, "-r", builder])
    run("installing the pinned versions (some minutes)", [*pip, "--no-build-isolation", "-r", pins])


def entry_of(name: str, requirements: str) -> str:
    """Return the lines of one package in a requirements file, its hashes included."""
    found = re.search(rf"^{re.escape(name)}==.*(?:(?<=\\)\n.*)*", requirements, re.MULTILINE)
    if found is None:
        raise SetupError(f"{name} is missing from the requirements; see CONTRIBUTING.md.")
    return found.group() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", default=".venv", help="where the environment is, or shall be")
    parser.add_argument("--python", default=sys.executable, help="the Python that makes it")
    arguments = parser.parse_args()
    venv = Path(os.path.abspath(ROOT / arguments.venv))  # not resolve(): a venv may be a link
    stamp = venv / STAMP
    key = stamp_key(venv)
    try:
        with only_one_setup(venv):
            if stamp.exists() and stamp.read_text() == key:
                return 0
            stamp.unlink(missing_ok=True)
            note = venv / MADE_BY_US
            ours = note.exists()
            killed = ours and note.read_text() == UNFINISHED
            if killed:
                say("the last set-up did not finish: making the environment again")
            if killed or not works(python_of(venv)):
                if venv.exists() and not ours and any(venv.iterdir()):
                    raise SetupError(
                        f"{venv} exists but has no working Python with pip, and this set-up did "
                        "not make it, so it is left alone. Pass another place with VENV=/path."
                    )
                make_venv(venv, arguments.python)
            install(venv)
            stamp.write_text(key)  # half of it would not match
        say("ready")
    except (SetupError, OSError) as error:
        if isinstance(error, OSError):
            place = "Fix that, or pass another place with VENV=/path."
            error = SetupError(f"the environment {venv} cannot be made: {error}. {place}")
        print(f"[setup] error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("[setup] interrupted; `make setup` starts it again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
