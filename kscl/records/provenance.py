"""Where a number comes from: the code, the libraries and the machine that made it.

A run reads its code when it starts (`loaded_code`), since files may be edited before it writes its
record hours later.

A record names the modules that its number depends on (its task's, and plug-ins); the hash covers
their syntax and that of all project modules that they import, without docstrings and comments. What
a registry loads by name is not followed: another probe cannot change this one's number.
"""

from __future__ import annotations

import ast
import base64
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kscl
from kscl.registry import imported_modules

PACKAGES = ("kscl", "linear_eval", "detection")
LIBRARIES = (
    *("torch", "torchvision", "timm", "detectron2", "fvcore", "iopath", "numpy"),
    "scikit-learn",
)
IGNORED_FIELDS = ("ctx", "kind", "type_comment")
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Code(NamedTuple):
    """The code of this process."""

    commit: str | None
    dirty: bool | None
    sources: dict[str, bytes]  # by module


class Syntax(NamedTuple):
    """A source file without comments and docstrings."""

    digest: bytes
    imports: tuple[str, ...]


@functools.cache
def loaded_code() -> Code:
    """Read the code of this process once; call it where a run starts, on every rank.

    It takes some 20 ms: nothing is parsed before a record is written.
    """
    home = _home()
    sources = read_sources(home) | plug_in_sources(imported_modules())
    commit, dirty = commit_of(home)
    if commit is None:
        commit, dirty = _from_installation(home)
    return Code(commit, dirty, sources)


def code_version() -> dict[str, object]:
    """Return version and commit, and whether the packages differ from it.

    Documents and configs may differ: a record holds its settings itself. In a checkout git answers.
    An installed package carries the commit it was built from, and is dirty when a file differs from
    what was installed; None means that it cannot be known.
    """
    code = loaded_code()
    return {"version": kscl.__version__, "commit": code.commit, "dirty": code.dirty}


def source_hash(modules: Sequence[str]) -> str | None:
    """Return the hash of the running code that these modules use.

    None if one is neither of the project nor imported: nothing is known of it then.
    """
    return hash_of_closure(modules, loaded_code().sources)


def hash_of_closure(modules: Iterable[str], sources: Mapping[str, bytes]) -> str | None:
    """Hash the syntax of modules and of all that they import among the sources."""
    found: dict[str, bytes] = {}
    waiting = [part for name in modules for part in _with_parents(name)]
    if not set(modules) <= sources.keys():
        return None
    while waiting:
        name = waiting.pop()
        if name in sources and name not in found:
            found[name], imports = _syntax(sources[name])
            waiting += imports
    lines = b"".join(name.encode() + b"\0" + found[name] for name in sorted(found))
    return hashlib.sha256(lines).hexdigest()[:16]


def read_sources(home: Path) -> dict[str, bytes]:
    """Return the source of every module of the project below `home`."""
    return {
        _module(path, home): path.read_bytes()
        for package in PACKAGES
        for path in sorted((home / package).rglob("*.py"))
    }


def plug_in_sources(modules: Iterable[str]) -> dict[str, bytes]:
    """Return the source of modules from outside, and of what is in the same package or folder."""
    found: dict[str, bytes] = {}
    for name in modules:
        top = name.partition(".")[0]
        try:
            spec = importlib.util.find_spec(top)
        except ValueError:
            spec = None
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        path = Path(spec.origin)
        is_package = bool(spec.submodule_search_locations)
        files = path.parent.rglob("*.py") if is_package else path.parent.glob("*.py")
        home = path.parent.parent if is_package else path.parent
        found |= {_module(file, home): file.read_bytes() for file in files}
    return found


def _module(path: Path, home: Path) -> str:
    return ".".join(path.relative_to(home).with_suffix("").parts).removesuffix(".__init__")


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


@functools.cache
def _syntax(source: bytes) -> Syntax:
    words: list[str] = []
    imports: list[str] = []
    _add_words(ast.parse(source), words, imports)
    digest = hashlib.sha256("\0".join(words).encode("utf-8", "surrogatepass")).digest()
    return Syntax(digest, tuple(imports))


def _add_words(node: Any, words: list[str], imports: list[str]) -> None:
    """Append the syntax tree as words, and what it imports; docstrings are left out."""
    if isinstance(node, list):
        for item in node:
            _add_words(item, words, imports)
    elif not isinstance(node, ast.AST):
        words.append(repr(node))
    elif not (isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"):
        if isinstance(node, ast.Import):
            imports += [part for it in node.names for part in _with_parents(it.name)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports += _with_parents(node.module)
            imports += [f"{node.module}.{it.name}" for it in node.names]
        words.append(type(node).__name__)
        for name in node._fields:
            value = getattr(node, name, None)
            if value is None or value == [] or name in IGNORED_FIELDS:
                continue
            if name == "body" and isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node):
                value = value[1:]
            words.append(name)
            _add_words(value, words, imports)
        words.append(")")


def commit_of(home: Path) -> tuple[str | None, bool | None]:
    """Return the commit of the checkout at `home`, and whether its packages differ from it."""
    top = _git(home, "rev-parse", "--show-toplevel")
    # site-packages may be inside another repository.
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
