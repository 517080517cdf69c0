"""Where a number comes from: the code, the libraries and the machine that made it.

A run calls `loaded_code` when it starts and writes its record hours later. A file that is edited in
between did not make the number.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import kscl

# The packages that can change a number of each kind of record, and the folders in them that cannot.
PRODUCERS = {
    "pretrain": ("kscl",),
    **dict.fromkeys(
        ("linear", "knn", "svm", "low_shot", "linear_suite", "finetune"), ("kscl", "linear_eval")
    ),
    "detection": ("kscl", "detection"),
}
PACKAGES = ("kscl", "linear_eval", "detection")
CHANGE_NO_NUMBER = (
    "kscl/benchmark/",
    "kscl/commands/",
    "kscl/datasets/",
    "linear_eval/commands/",
    "detection/commands/",
)
LIBRARIES = (
    "torch",
    "torchvision",
    "timm",
    "detectron2",
    "fvcore",
    "iopath",
    "numpy",
    "scikit-learn",
)


class Code(NamedTuple):
    """The code of this process."""

    commit: str | None
    dirty: bool | None
    digests: dict[str, bytes]  # of every Python file, by its path


@functools.cache
def loaded_code() -> Code:
    """Look at the code of this process once; call it where a run starts, on every rank.

    It takes some 20 ms, so that a --help does not wait for it.
    """
    home = _home()
    digests = _digests(home)
    commit, dirty = commit_of(home)
    if commit is None:
        commit, dirty = _from_installation(home)
    return Code(commit, dirty, digests)


def code_version(kind: str | None = None) -> dict[str, object]:
    """Return version, commit, whether the packages differ from it, and a hash of the source itself.

    Documents and configs may differ: a record holds its settings itself. In a checkout git answers.
    An installed package carries the commit it was built from, and is dirty when a file differs from
    what was installed; None means that it cannot be known.
    """
    return {
        "version": kscl.__version__,
        "commit": loaded_code().commit,
        "dirty": loaded_code().dirty,
        "source_hash": source_hash(kind),
    }


def source_hash(kind: str | None = None) -> str:
    """Return the hash of the running code that can change a number of this kind of record."""
    return _hash(loaded_code().digests, kind)


def source_hash_of(home: Path, kind: str | None = None) -> str:
    """Hash the Python files below `home` that can change a number of this kind; all without a kind.

    Equal code has equal hashes, committed or not.
    """
    return _hash(_digests(home), kind)


def _digests(home: Path) -> dict[str, bytes]:
    return {
        path.relative_to(home).as_posix(): hashlib.sha256(path.read_bytes()).digest()
        for package in PACKAGES
        for path in sorted((home / package).rglob("*.py"))
    }


def _hash(digests: Mapping[str, bytes], kind: str | None) -> str:
    digest = hashlib.sha256()
    packages = PRODUCERS[kind] if kind else PACKAGES
    for name, content in digests.items():
        if name.split("/")[0] not in packages:
            continue
        if kind is None or not name.startswith(CHANGE_NO_NUMBER):
            digest.update(f"{name}\0".encode() + content)
    return digest.hexdigest()[:16]


def commit_of(home: Path) -> tuple[str | None, bool | None]:
    """Return the commit of the checkout at `home`, and whether its packages differ from it."""
    top = _git(home, "rev-parse", "--show-toplevel")
    # site-packages may be inside somebody else's repository: its commit says nothing about us.
    if top is None or Path(top).resolve() != home.resolve():
        return None, None
    commit = _git(home, "rev-parse", "HEAD")
    if commit is None:
        return None, None
    return commit, bool(_git(home, "status", "--porcelain", "--", *PACKAGES))


def library_versions() -> dict[str, str | None]:
    """Return the versions of Python and of the libraries; None for one that is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _home() -> Path:
    return Path(kscl.__file__).resolve().parent.parent


def _git(home: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(home), *words], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _from_installation(home: Path) -> tuple[str | None, bool | None]:
    try:
        info = json.loads((home / "kscl" / "build_info.json").read_text())
        files = importlib.metadata.files("kscl") or []
    except (OSError, ValueError, importlib.metadata.PackageNotFoundError):
        return None, None
    dirty = info["dirty"] or any(_changed(file) for file in files if file.suffix == ".py")
    return info["commit"], dirty


def _changed(file: importlib.metadata.PackagePath) -> bool:
    if file.hash is None:
        return False
    try:
        digest = hashlib.new(file.hash.mode, file.read_binary()).digest()
    except OSError:
        return True
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value
