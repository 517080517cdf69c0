"""Install Detectron2, which is not on PyPI under its own name and has no wheels for new Pythons.

By default a pinned wheel is downloaded, checked by its hash and repacked as a pure Python package:
what we need (C4, FPN and RetinaNet detectors, data, evaluators) runs without the compiled part.
`--from-source` builds the official repository instead, with a compiler.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from kscl import cli
from kscl.errors import KsclError

EXAMPLES = """  kscl install-detectron2                 the pinned pure-Python Detectron2
  kscl install-detectron2 --from-source   build the official repository (git, compiler)
  kscl install-detectron2 --wheel FILE    use a wheel fetched elsewhere (same hash)
"""
UPSTREAM = "https://github.com/facebookresearch/detectron2"
UPSTREAM_COMMIT = "a59f0563"
CARRIER = "sal-detectron2"
CARRIER_VERSION = "0.7.2"
CARRIER_SHA256 = "491af0c7f79bdb2d178e46f6cb16a97c4ac968d45c41ea3f6b6435d59bbee561"
VERSION = f"0.6+{UPSTREAM_COMMIT}"
WHEEL_TAG = "py3-none-any"
REPRODUCIBLE_TIME = (2024, 4, 17, 0, 0, 0)  # the date of the upstream commit
FROM_SOURCE = (f"git+{UPSTREAM}.git", "--no-build-isolation")

# The carrier's requirements without `numpy<2` and `black`, which are not needed.
REQUIRES = (
    "Pillow>=7.1",
    "matplotlib",
    "pycocotools>=2.0.2",
    "termcolor>=1.1",
    "yacs>=0.1.8",
    "tabulate",
    "cloudpickle",
    "tqdm>4.29.0",
    "tensorboard",
    "fvcore",
    "iopath>=0.1.7",
    "omegaconf>=2.1,<2.4",
    "hydra-core>=1.1",
    "packaging",
)

METADATA = f"""Metadata-Version: 2.1
Name: detectron2
Version: {VERSION}
Summary: Detectron2 at upstream commit {UPSTREAM_COMMIT} (2024-04-17), pure Python part only
Home-page: {UPSTREAM}
Author: FAIR
License: Apache-2.0
Requires-Python: >=3.8
{"".join(f"Requires-Dist: {requirement}{chr(10)}" for requirement in REQUIRES)}
Repacked by the KSCL transfer suite from the PyPI wheel {CARRIER} {CARRIER_VERSION}
(sha256 {CARRIER_SHA256}).
Left out: the compiled module detectron2._C, built for one Python version only, and the wheel's
top-level package `tools`. The Python files of `detectron2` are those of the wheel, to the byte.
"""


def require_detectron2() -> None:
    """Raise an error with the fix if Detectron2 does not import."""
    try:
        import detectron2  # noqa: F401
    except ImportError as error:
        raise KsclError(
            f"Detection needs Detectron2, which does not import here ({error}).\n"
            "Install it with `kscl install-detectron2`, or run `make setup` in the repository."
        ) from error


def importable_version() -> str | None:
    """Return the version of Detectron2 if it imports, in a new process without caches."""
    code = "import detectron2.modeling, detectron2; print(detectron2.__version__)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True
    )
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else None


def installed_as() -> str | None:
    """Return the version that pip knows."""
    try:
        return importlib.metadata.version("detectron2")
    except importlib.metadata.PackageNotFoundError:
        return None


def pip(*words: str, failure: str = "", fix: str = "") -> None:
    """Run pip with this Python; raise an error if it fails and `failure` says what that means."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and failure:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")]
        said = "\n  ".join((errors or lines or ["pip said nothing"])[-3:])
        raise KsclError(f"{failure}:\n  {said}\n{fix}")


def download_carrier(folder: Path) -> Path:
    """Download the pinned wheel into a folder and return its path."""
    # The wheel is for Python 3.10, but its pure Python files run on any version.
    pip(
        *("download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.10"),
        *("--implementation", "cp", "--abi", "none", "--platform", "any"),
        *("-d", str(folder), f"{CARRIER}=={CARRIER_VERSION}"),
        failure=f"{CARRIER} {CARRIER_VERSION} could not be downloaded from the package index",
        fix="Check the network, or fetch the wheel elsewhere and pass it with --wheel FILE.",
    )
    return next(folder.glob("*.whl"))


def check_hash(wheel: Path) -> None:
    """Raise an error unless the wheel has the pinned hash."""
    try:
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    except OSError as error:
        raise KsclError(f"{wheel} cannot be read: {error.strerror}") from error
    if found != CARRIER_SHA256:
        raise KsclError(
            f"{wheel.name} does not have the pinned hash, so nothing was installed:\n"
            f"  expected sha256 {CARRIER_SHA256}\n  found    sha256 {found}\n"
            "Delete it (and pip's cache: `pip cache purge`) and try again, or build the official "
            "one with --from-source."
        )


def repack(carrier: Path, folder: Path) -> Path:
    """Write a wheel called detectron2 with the pure Python files and our metadata."""
    info = f"detectron2-{VERSION}.dist-info"
    target = folder / f"detectron2-{VERSION}-{WHEEL_TAG}.whl"
    recorded: list[tuple[str, str, int]] = []

    with zipfile.ZipFile(carrier) as source, zipfile.ZipFile(target, "w") as wheel:

        def add(name: str, content: bytes) -> None:
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            recorded.append((name, f"sha256={digest.decode()}", len(content)))
            entry = zipfile.ZipInfo(name, REPRODUCIBLE_TIME)
            entry.external_attr = 0o644 << 16
            wheel.writestr(entry, content, zipfile.ZIP_DEFLATED)

        for name in sorted(source.namelist()):
            if name.startswith("detectron2/") and not Path(name).name.startswith("_C."):
                add(name, source.read(name))
        license = f"{CARRIER.replace('-', '_')}-{CARRIER_VERSION}.dist-info/LICENSE"
        add(f"{info}/LICENSE", source.read(license))
        add(f"{info}/METADATA", METADATA.encode())
        about = ("Wheel-Version: 1.0", "Generator: kscl", "Root-Is-Purelib: true")
        add(f"{info}/WHEEL", "\n".join((*about, f"Tag: {WHEEL_TAG}", "")).encode())
        table = io.StringIO()
        csv.writer(table, lineterminator="\n").writerows([*recorded, (f"{info}/RECORD", "", "")])
        wheel.writestr(zipfile.ZipInfo(f"{info}/RECORD", REPRODUCIBLE_TIME), table.getvalue())
    return target


def install_wheel(wheel: Path) -> None:
    """Install one wheel without an index."""
    pip(
        *("install", "-q", "--no-deps", "--no-index", "--force-reinstall", str(wheel)),
        failure=f"pip could not install Detectron2 into {sys.prefix}",
        fix="If you cannot write there, use your own environment: `make setup`.",
    )


def install(from_source: bool = False, wheel: Path | None = None, force: bool = False) -> str:
    """Install Detectron2 unless it imports already; return a sentence on the result."""
    before = installed_as()
    if not force and (present := importable_version()):
        return f"Kept: Detectron2 {before or present} imports already."
    if from_source:
        print(f"Building {UPSTREAM} (needs git, a C++ compiler and some minutes)", flush=True)
        pip(
            *("install", *FROM_SOURCE),
            failure="The official Detectron2 could not be built",
            fix="Without --from-source the pinned pure-Python one needs no compiler.",
        )
    else:
        with tempfile.TemporaryDirectory() as folder:
            carrier = wheel or download_carrier(Path(folder))
            check_hash(carrier)
            install_wheel(repack(carrier, Path(folder)))
    if importable_version() is None:
        if before is None:
            pip("uninstall", "-q", "-y", "detectron2")
        raise KsclError(
            "Detectron2 was installed but does not import: requirements are missing or of other "
            "versions. `make setup` installs versions that work together."
        )
    return f"Installed: Detectron2 {installed_as()}, from {UPSTREAM}."


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__ or "", EXAMPLES)
    parser.add_argument("--from-source", action="store_true", help="build the official repository")
    parser.add_argument("--wheel", type=Path, help="use this file instead of downloading it")
    parser.add_argument("--force", action="store_true", help="replace one that imports already")
    arguments = parser.parse_args(argv)
    print(install(arguments.from_source, arguments.wheel, arguments.force))
    return 0
