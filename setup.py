"""Which packages are built, and the commit they are built from; the rest is pyproject.toml."""

import json
import subprocess
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def git(*words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
    ).stdout.strip()


class BuildWithCommit(build_py):
    """An installed package has no git beside it, so the commit goes along."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        try:
            changes = git("status", "--porcelain", "--", "kscl", "linear_eval", "detection")
            info = {"commit": git("rev-parse", "HEAD"), "dirty": bool(changes)}
        except (OSError, subprocess.CalledProcessError):
            info = {"commit": None, "dirty": None}
        (Path(self.build_lib) / "kscl" / "build_info.json").write_text(json.dumps(info))


setup(
    # tools/ is not installed: a top-level package of that name would shadow other people's.
    packages=[
        *find_packages(include=["kscl", "kscl.*", "linear_eval", "linear_eval.*"]),
        *find_packages(include=["detection", "detection.*"]),
        "kscl.configs",
    ],
    package_dir={"kscl.configs": "configs"},
    cmdclass={"build_py": BuildWithCommit},
)
