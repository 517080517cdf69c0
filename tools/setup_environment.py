"""Make the environment: `make setup` runs this with a bare Python, so it needs nothing installed.

A stamp in the environment remembers what was installed from which pins; while it matches there is
nothing to do. It is written last, so an interrupted set-up is simply taken up again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = "kscl-setup.stamp"
MADE_BY_US = "kscl-made-this-environment"
PINNED_PYTHON = (3, 11)
DECIDES_WHAT_IS_INSTALLED = (
    "requirements.txt",
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
    """Something the user can mend."""


def say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


def python_of(venv: Path) -> Path:
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def stamp_key(venv: Path) -> str:
    """Changes when the pins, the installers or the place of the project change."""
    digest = hashlib.sha256(f"{ROOT}\n{venv}\n".encode())
    for name in DECIDES_WHAT_IS_INSTALLED:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def run(step: str, command: list[str | Path]) -> None:
    say(step)
    start = time.monotonic()
    done = subprocess.run([str(part) for part in command], cwd=ROOT)
    if done.returncode:
        raise SetupError(
            f"'{step}' failed (exit code {done.returncode}); the lines above say why.\n"
            "        Mend it and run `make setup` again: finished steps are quick the second time."
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
    """A half-made environment has a Python but no pip yet, or none that starts."""
    try:
        return (
            subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0
        )
    except OSError:
        return False


def make_venv(venv: Path, python: str) -> None:
    version = python_version(python)
    if version < PINNED_PYTHON:
        raise SetupError(
            f"{python} is Python {version[0]}.{version[1]}; the pinned versions need "
            f"{PINNED_PYTHON[0]}.{PINNED_PYTHON[1]} or later. Pass one with PYTHON=/path/to/it."
        )
    venv.mkdir(parents=True, exist_ok=True)
    (venv / MADE_BY_US).touch()
    run(f"making the environment {venv}", [python, "-m", "venv", "--clear", venv])
    (venv / MADE_BY_US).touch()  # --clear removed it


@contextlib.contextmanager
def only_one_setup(venv: Path) -> Iterator[None]:
    """Two `make`s at once would write into the same site-packages."""
    lock = venv.with_name(f".{venv.name}.setup.lock")
    try:
        import fcntl

        with lock.open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another set-up of this environment is running; waiting for it")
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
    except (ImportError, PermissionError):  # no such lock here: one set-up at a time is the user's
        yield


def install(venv: Path) -> None:
    python = python_of(venv)
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    if (venv / MADE_BY_US).exists():
        pins = ROOT / "requirements.txt"
        run("installing the pinned versions (some minutes)", [*pip, "-r", pins])
        run("installing the project", [*pip, "--no-deps", "-e", ROOT])
    else:
        say(f"{venv} is your own environment: what is there and fits setup.py's ranges is kept")
        run("installing the project and what is missing", [*pip, "-e", f"{ROOT}[dev]"])
    run("installing Detectron2", [python, ROOT / "tools" / "install_detectron2.py"])
    run("proving it: imports and one forward pass", [python, "-W", "ignore", "-c", PROOF])


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
            if not works(python_of(venv)):
                if venv.exists() and not (venv / MADE_BY_US).exists() and any(venv.iterdir()):
                    raise SetupError(
                        f"{venv} exists but has no working Python with pip, and this set-up did "
                        "not make it, so it is left alone. Pass another place with VENV=/path."
                    )
                make_venv(venv, arguments.python)
            install(venv)
            temporary = stamp.with_suffix(".tmp")
            temporary.write_text(key)
            temporary.replace(stamp)
        say("ready")
    except SetupError as error:
        print(f"[setup] error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("[setup] interrupted; `make setup` takes it up again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
