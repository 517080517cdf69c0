"""What is installed here, what the machine has, and every problem with its fix.

Imports nothing at the top that may be missing: it must be able to say so.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kscl import cli
from kscl.config.shipped import shipped_configs
from kscl.records.provenance import code_version
from kscl.runtime.machine import total_memory, usable_cores

GIB = 2**30
LITTLE_DISK = 5 * GIB
LITTLE_SHARED_MEMORY = GIB
WITHOUT_COMPILED_PART = (
    "the compiled part is absent: C4 and FPN detectors, VOC and COCO scoring work; deformable "
    "convolutions and rotated boxes do not, and COCO scoring is pycocotools' slower one"
)
EXAMPLES = """  kscl-doctor            a table for a person
  kscl-doctor --json     the same for a script; exit code 1 if something needed is missing
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report; a finding with a fix is a problem, needed or merely noted."""

    what: str
    value: str
    fix: str = ""
    needed: bool = False

    @property
    def mark(self) -> str:
        return "ok" if not self.fix else ("PROBLEM" if self.needed else "note")


def examine() -> list[Finding]:
    return [*_python(), *_libraries(), *_detectron2(), *_devices(), *_machine(), *_project()]


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__ or "", EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(argv)
    findings = examine()
    healthy = not any(finding.fix and finding.needed for finding in findings)
    if arguments.json:
        rows = [asdict(finding) | {"mark": finding.mark} for finding in findings]
        print(json.dumps({"healthy": healthy, "findings": rows}, indent=2))
    else:
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            print(f"{finding.mark:>7}  {finding.what:<{width}}  {finding.value}")
            if finding.fix:
                print(f"{'':>7}  {'':<{width}}  → {finding.fix}")
        print(
            "everything needed is here" if healthy else "something needed is missing: see PROBLEM"
        )
    return 0 if healthy else 1


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    fix = "" if good else "use Python 3.11 or later: make setup PYTHON=/path/to/python3.11"
    yield Finding("Python", f"{version} ({sys.executable})", fix, needed=True)


def _libraries() -> Iterator[Finding]:
    try:
        from packaging.requirements import Requirement
        from packaging.version import Version

        wanted = [Requirement(line) for line in importlib.metadata.requires("kscl") or []]
    except importlib.metadata.PackageNotFoundError:
        yield Finding("kscl", "not installed", "make setup, or pip install -e .", needed=True)
        return
    except ImportError:
        yield Finding("packaging", "missing", "make setup, or pip install packaging", needed=True)
        return
    for requirement in wanted:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        fix = f"make setup, or pip install '{requirement}'"
        try:
            version = Version(importlib.metadata.version(requirement.name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(requirement.name, "missing", fix, needed=True)
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        text = str(version) if fits else f"{version}, but {requirement.specifier} is needed"
        yield Finding(requirement.name, text, "" if fits else fix, needed=True)


def _detectron2() -> Iterator[Finding]:
    fix = "kscl-install-detectron2, or make setup"
    if importlib.util.find_spec("detectron2") is None:
        yield Finding("Detectron2", "missing", fix, needed=True)
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import detectron2.modeling
    except Exception as error:  # whatever breaks its import is the finding
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
        fix = "only if you need those: kscl-install-detectron2 --from-source --force"
        yield Finding("Detectron2 compiled", WITHOUT_COMPILED_PART, fix)


def _devices() -> Iterator[Finding]:
    try:
        import torch
        import torchvision
    except Exception as error:  # a mismatched pair fails in many ways
        fix = "install torch and torchvision of one release: make setup"
        yield Finding("torch and torchvision", f"do not import: {error}", fix, needed=True)
        return
    try:
        torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except Exception as error:
        fix = "the two do not fit each other: make setup"
        yield Finding("torchvision's operators", str(error), fix, needed=True)
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Finding(f"GPU {index}", f"{properties.name}, {properties.total_memory / GIB:.0f} GiB")
    if not torch.cuda.is_available():
        fix = "small runs work on the CPU; the full-scale recipes need GPUs"
        yield Finding("GPU", f"none that torch {torch.__version__} can use", fix)
    backends = [name for name in ("gloo", "nccl") if _has_backend(name)]
    fix = "" if backends else "runs on several processes need a torch built with gloo or nccl"
    yield Finding("distributed", ", ".join(backends) or "no backend", fix)


def _has_backend(name: str) -> bool:
    import torch.distributed as dist

    return dist.is_available() and bool(getattr(dist, f"is_{name}_available")())


def _machine() -> Iterator[Finding]:
    yield Finding("cores", str(usable_cores()))
    yield Finding("memory", f"{total_memory() / GIB:.1f} GiB")
    free = shutil.disk_usage(".").free
    fix = "" if free >= LITTLE_DISK else "checkpoints may not fit: free some, or set OUTPUT_DIR"
    yield Finding("disk free here", f"{free / GIB:.1f} GiB", fix)
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        few = "loader workers may die: give the container more (docker run --shm-size 8g)"
        fix = "" if free >= LITTLE_SHARED_MEMORY else few
        yield Finding("shared memory", f"{free / GIB:.1f} GiB", fix)


def _project() -> Iterator[Finding]:
    code = code_version()
    state = {True: ", with changes", False: "", None: ", changes unknown"}[code["dirty"]]  # type: ignore[index]
    yield Finding("kscl", f"{code['version']}, commit {str(code['commit'])[:12]}{state}")
    configs = len(list(shipped_configs().rglob("*.yaml")))
    fix = "" if configs else "the installation is incomplete: install it again"
    yield Finding("configs", f"{configs} in {shipped_configs()}", fix, needed=True)
