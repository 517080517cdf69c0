"""The health of an installation: what is installed, what the machine has, and every problem's fix.

Imports nothing at the top that may be missing: it must be able to say so.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kscl.records.provenance import code_version
from kscl.runtime.machine import (
    shipped_configs,
    total_memory,
    usable_cores,
    without_kernels,
)
from kscl.runtime.startup import UNINSTALL, hidden_packages, mixed_packages

GIB = 2**30
MIN_PYTHON = (3, 11)
LITTLE_DISK = 5 * GIB
LITTLE_SHARED_MEMORY = GIB
WITHOUT_COMPILED_PART = (
    "absent: C4 and FPN detectors, VOC and COCO scoring work; deformable convolutions and rotated "
    "boxes do not, and COCO scoring is the slower one of pycocotools"
)


@dataclass(frozen=True)
class Finding:
    """One line of the report; a finding with a fix is a problem, or a note if it is not needed."""

    what: str
    value: str
    fix: str = ""
    needed: bool = False

    @property
    def mark(self) -> str:
        """Return ok, note or PROBLEM."""
        return "ok" if not self.fix else ("PROBLEM" if self.needed else "note")


def examine() -> list[Finding]:
    """Examine Python, the libraries, the devices, the machine and the project."""
    return [*_python(), *_libraries(), *_detectron2(), *_devices(), *_machine(), *_project()]


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    good = sys.version_info >= MIN_PYTHON
    fix = "" if good else "Use Python 3.11 or later: make setup PYTHON=/path/to/python3.11."
    yield Finding("Python", f"{version} ({sys.executable})", fix, needed=True)


def _libraries() -> Iterator[Finding]:
    try:
        from packaging.requirements import Requirement

        wanted = [Requirement(line) for line in importlib.metadata.requires("kscl") or []]
    except importlib.metadata.PackageNotFoundError:
        yield Finding("kscl", "not installed", "Run make setup, or pip install -e .", needed=True)
        return
    except ImportError:
        yield Finding(
            "packaging", "missing", "Run make setup, or pip install packaging.", needed=True
        )
        return
    for requirement in wanted:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        fix = f"Run make setup, or pip install '{requirement}'."
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(requirement.name, "missing", fix, needed=True)
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        text = version if fits else f"{version}, but {requirement.specifier} is needed"
        yield Finding(requirement.name, text, "" if fits else fix, needed=True)


def _detectron2() -> Iterator[Finding]:
    fix = "Run kscl install-detectron2, or make setup."
    if importlib.util.find_spec("detectron2") is None:
        yield Finding("Detectron2", "missing", fix, needed=True)
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import detectron2.modeling
    except Exception as error:  # whatever breaks the import is the finding
        yield Finding("Detectron2", f"does not import: {error}", fix, needed=True)
        return
    try:
        version = importlib.metadata.version("detectron2")
    except importlib.metadata.PackageNotFoundError:
        version = detectron2.__version__
    yield Finding("Detectron2", version)
    if importlib.util.find_spec("detectron2._C"):
        yield Finding("Detectron2 compiled", "present")
    else:
        fix = "Only if you need those: kscl install-detectron2 --from-source --force."
        yield Finding("Detectron2 compiled", WITHOUT_COMPILED_PART, fix)


def _devices() -> Iterator[Finding]:
    try:
        import torch
        import torchvision
    except Exception as error:  # a mismatched pair fails in many ways
        fix = "Install torch and torchvision of one release: make setup."
        yield Finding("torch and torchvision", f"do not import: {error}", fix, needed=True)
        return
    try:
        torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except Exception as error:
        fix = "The two do not fit each other: make setup."
        yield Finding("torchvision's operators", str(error), fix, needed=True)
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        lack, fix = without_kernels(index)
        value = lack or f"{properties.name}, {properties.total_memory / GIB:.0f} GiB"
        yield Finding(f"GPU {index}", value, f"{fix}." if fix else "", needed=True)
    if not torch.cuda.is_available():
        fix = "Small runs work on the CPU; the full-scale recipes need GPUs."
        yield Finding("GPU", f"none that torch {torch.__version__} can use", fix)
    known = {name: f"is_{name}_available" for name in ("gloo", "nccl")}  # absent in some builds
    backends = [name for name, has in known.items() if getattr(torch.distributed, has, bool)()]
    fix = "" if backends else "Runs on several processes need a torch built with gloo or nccl."
    yield Finding("distributed", ", ".join(backends) or "no backend", fix)


def _machine() -> Iterator[Finding]:
    yield Finding("cores", str(usable_cores()))
    yield Finding("memory", f"{total_memory() / GIB:.1f} GiB")
    free = shutil.disk_usage(".").free
    fix = "" if free >= LITTLE_DISK else "Checkpoints may not fit. Free some, or set OUTPUT_DIR."
    yield Finding("disk free here", f"{free / GIB:.1f} GiB", fix)
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        few = "Loader workers may die. Give the container more (docker run --shm-size 8g)."
        fix = "" if free >= LITTLE_SHARED_MEMORY else few
        yield Finding("shared memory", f"{free / GIB:.1f} GiB", fix)


def _project() -> Iterator[Finding]:
    code = code_version()
    state = {True: ", with changes", False: "", None: ", changes unknown"}[code["dirty"]]  # type: ignore[index]
    yield Finding("kscl", f"{code['version']}, commit {str(code['commit'])[:12]}{state}")
    for name, how in (*hidden_packages(), *mixed_packages()):
        yield Finding(name, how, UNINSTALL, needed=True)
    configs = len(list(shipped_configs().rglob("*.yaml")))
    fix = "" if configs else "The installation is incomplete. Install it again."
    yield Finding("configs", f"{configs} in {shipped_configs()}", fix, needed=True)
