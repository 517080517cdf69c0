"""Nobody waits for a --help: no tool imports a deep-learning library to print it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.commands import ROOT

TOOLS = sorted(path.stem for path in (ROOT / "tools").glob("*.py"))
SLOW = {"torch", "torchvision", "timm", "detectron2", "sklearn", "matplotlib", "cv2"}
# Run a tool as `python tools/X.py --help` does; then name what it has imported.
PROGRAM = """
import runpy, sys
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print("MODULES", *sys.modules)
"""


@pytest.mark.parametrize("name", TOOLS)
def test_help_imports_no_slow_library(name):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(ROOT / "tools" / f"{name}.py")],
        cwd=ROOT / "tools",
        capture_output=True,
        text=True,
        check=True,
    )
    text, _, modules = done.stdout.rpartition("MODULES")
    assert "usage" in text
    imported = {module.split(".")[0] for module in modules.split()}
    assert not SLOW & imported


def test_without_a_bare_help_the_package_registers_its_head():
    program = (
        "import sys; sys.argv = ['mine.py', '--config', 'x', '--help']; import detection\n"
        "from detectron2.modeling import ROI_HEADS_REGISTRY as known\n"
        "assert 'Res5ROIHeadsExtraNorm' in known"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, check=True)
