"""Run the smoke tests on the oldest and the newest versions that pyproject.toml promises.

`make test-versions` runs this with a bare Python. Each set of versions gets an environment of its
own in a temporary folder (5 GB each; TMPDIR chooses the disk), which is removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINORS = (11, 12, 13)  # of Python 3, the tested ones
REQUIREMENTS = """
import importlib.metadata, json
print(json.dumps(importlib.metadata.requires("kscl")))
"""


def find_python(minor: int) -> str | None:
    """Return a Python 3.`minor` that starts: this one, one on the PATH, or one of pyenv's."""
    own = Path.home() / ".pyenv" / "versions"
    candidates = [sys.executable, f"python3.{minor}"]
    candidates += [str(path / "bin" / "python") for path in sorted(own.glob(f"3.{minor}.*"))]
    for candidate in candidates:
        code = f"import sys; sys.exit(sys.version_info[:2] != (3, {minor}))"
        try:
            if subprocess.run([candidate, "-c", code], capture_output=True).returncode == 0:
                return candidate
        except OSError:
            continue
    return None


def lower_bound(requirement: str) -> str:
    """Return the requirement pinned to its lower bound; one without a bound stays open."""
    plain = requirement.split(";")[0].strip()
    match = re.match(r"([\w.-]+)\s*(.*)", plain)
    assert match is not None
    name, ranges = match.groups()
    bound = re.search(r">=\s*([^,\s]+)", ranges)
    if bound is None:
        return plain
    version = bound.group(1)
    exact = "post" in version or version.count(".") > 1
    return f"{name}=={version}" if exact else f"{name}=={version}.*,{ranges}"


def run(*command: str | Path) -> str:
    words = [str(word) for word in command]
    print("$", *words, flush=True)
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stdout)
        raise SystemExit(f"error: `{' '.join(words)}` ended with exit code {done.returncode}.")
    return done.stdout


def try_versions(folder: Path, oldest: bool, base: str) -> None:
    """Make the environment and run the smoke tests in it."""
    run(base, "-m", "venv", folder)
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "-q")
    run(*pip, "--upgrade", "pip", "setuptools")
    run(*pip, "--no-deps", "--no-build-isolation", "-e", ROOT)
    # -I: metadata that an earlier build has left in the checkout is not looked at.
    requirements = json.loads(run(python, "-I", "-c", REQUIREMENTS))
    wanted = [text.split(";")[0].strip() for text in requirements]
    run(*pip, *(map(lower_bound, wanted) if oldest else wanted))
    run(python, ROOT / "tools" / "install_detectron2.py")
    print(run(python, "-m", "pip", "--disable-pip-version-check", "freeze"))
    smoke = ("-m", "smoke", "-q", "-p", "no:cacheprovider")
    print(run(python, "-W", "ignore::FutureWarning", "-m", "pytest", *smoke))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("oldest", "newest"), help="default: one after the other")
    arguments = parser.parse_args()
    found = {minor: python for minor in MINORS if (python := find_python(minor))}
    if not found:
        print(f"error: there is no Python 3.{MINORS[0]} to 3.{MINORS[-1]} here.", file=sys.stderr)
        return 2
    os.environ.pop("PYTHONPATH", None)
    for name, minor in (("oldest", min(found)), ("newest", max(found))):
        if arguments.only in (None, name):
            print(f"== {name}: Python 3.{minor}", flush=True)
            folder = Path(tempfile.mkdtemp(prefix=f"kscl-{name}-"))
            try:
                try_versions(folder, name == "oldest", found[minor])
            finally:
                shutil.rmtree(folder)
            print(f"== {name}: the smoke tests pass", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
