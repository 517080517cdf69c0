"""Memory that was freed is reused without asking the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.commands import ROOT

COUNT_FAULTS = """
import resource, sys
import torch
from kscl.runtime.machine import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = 0
for turn in range(40):
    torch.ones(10_000_000)
    if turn == 29:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="an allocator of Linux")
def test_repeated_large_tensors_cost_no_page_faults_when_memory_is_kept() -> None:
    faults = {}
    for choice in ("keep", "return"):
        command = [sys.executable, "-c", COUNT_FAULTS, choice]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        faults[choice] = int(done.stdout)
    assert faults["keep"] < 0.1 * faults["return"], faults
