"""Run the tests that train or compare floats as other CPUs would (make test-portable).

Each setting makes the libraries compute with fewer instructions or another number of threads, so
that sums are taken in another order. A test whose verdict changes depends on rounding.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

ROOT = Path(__file__).parent.parent
SIDE_BY_SIDE = 2
PYTEST = [sys.executable, "-W", "ignore::FutureWarning", "-m", "pytest", "-q", "--tb=short"]
SELECTED = ["-p", "no:cacheprovider", "-m", "portable and not slow and not gpu"]

LOWEST = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3",
    "OMP_NUM_THREADS": "1",
}
SETTINGS = [  # the slowest first
    LOWEST,
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"MKL_CBWR": "COMPATIBLE"},
    {"NPY_DISABLE_CPU_FEATURES": "X86_V3"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"OMP_NUM_THREADS": "2"},
]  # OMP_NUM_THREADS=1 alone is how `make test` runs all tests (tests/conftest.py).
# What the libraries say that they use; a setting they do not follow shows here.
PROBE = """
import torch
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
torch.ones(64, 64) @ torch.ones(64, 64)
torch.nn.functional.conv2d(torch.ones(8, 16, 32, 32), torch.ones(16, 16, 3, 3))
units = [name for name in __cpu_dispatch__ if __cpu_features__[name]]
print("numpy", ",".join(units) or "none")
print("aten", torch.backends.cpu.get_cpu_capability(), "threads", torch.get_num_threads())
"""
USED = {
    "ATen": r"^aten (\S+)",
    "oneDNN": r"^onednn_verbose.*cpu,isa:(?:Intel )?(.+)$",
    "MKL": r"CNR:(\S+)",
    "NumPy": r"^numpy (\S+)",
    "threads": r"threads (\d+)",
}


class Outcome(NamedTuple):
    setting: str
    used: dict[str, str]
    verdict: str  # "passed", "failed" or why it was not run
    counts: str
    seconds: float
    output: str


def marked_files() -> list[str]:
    """Return the test files that mark a test as portable: collecting the others takes longer."""
    files = sorted(Path(ROOT, "tests").rglob("test_*.py"))
    return [str(file) for file in files if "mark.portable" in file.read_text(encoding="utf-8")]


def missing(setting: dict[str, str]) -> str:
    """Return why this CPU cannot run a setting, or nothing."""
    cpu = Path("/proc/cpuinfo")
    asks_for_avx2 = "avx2" in " ".join(setting.values()).lower()
    if asks_for_avx2 and cpu.exists() and not re.search(r"\bavx2\b", cpu.read_text()):
        return "not run: this CPU has no AVX2"
    return ""


def used_by(environment: dict[str, str]) -> dict[str, str]:
    """Return the instruction sets that each library says it uses."""
    verbose = {"ONEDNN_VERBOSE": "1", "MKL_VERBOSE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", PROBE]
    done = subprocess.run(command, env=environment | verbose, capture_output=True, text=True)
    found = {name: re.search(rule, done.stdout, re.MULTILINE) for name, rule in USED.items()}
    return {name: match[1] if match else "unknown" for name, match in found.items()}


def run(setting: dict[str, str]) -> Outcome:
    """Run the selected tests under one setting, and with one thread unless it says otherwise."""
    inherited = {key: value for key, value in os.environ.items() if key not in LOWEST}
    environment = inherited | {"OMP_NUM_THREADS": "1"} | setting
    name = "all at their lowest" if setting == LOWEST else " ".join(map("=".join, setting.items()))
    if reason := missing(setting):
        return Outcome(name, {}, reason, "", 0.0, "")
    used = used_by(environment)
    start = time.monotonic()
    command = [*PYTEST, *SELECTED, *(sys.argv[1:] or marked_files())]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or [f"pytest ended with {done.returncode}"]
    verdict = "failed" if done.returncode else "passed"
    counts = re.sub(r"=| in .*", "", lines[-1]).strip()
    seconds = time.monotonic() - start
    print(f"{name}: {counts} in {seconds:.0f} s", flush=True)
    return Outcome(name, used, verdict, counts, seconds, done.stdout + done.stderr)


def main() -> int:
    """Print a table of settings and verdicts; return 1 if a test failed under any of them."""
    start = time.monotonic()
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        outcomes = list(pool.map(run, SETTINGS))
    for outcome in outcomes:
        if outcome.verdict == "failed":
            print(f"\n{outcome.setting}\n{outcome.output[-6000:]}")
    rows = [
        [o.setting, *(o.used.get(name, "") for name in USED), o.verdict, o.counts, o.seconds]
        for o in outcomes
    ]
    headers = ["setting", *USED, "verdict", "tests", "seconds"]
    print(tabulate(rows, headers, floatfmt=".0f", disable_numparse=[5]))
    print(f"{time.monotonic() - start:.0f} seconds in all, {SIDE_BY_SIDE} settings side by side")
    return int(any(outcome.verdict == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
