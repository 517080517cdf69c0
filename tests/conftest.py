"""Give each test process one core: two of them run side by side (make test)."""

from __future__ import annotations

import os
import signal

# Before other imports, as libraries read these once; and without xdist too, so that a process and
# the ranks that it starts divide their sums alike, however many cores there are.
threads = os.environ.setdefault("OMP_NUM_THREADS", "1")
for name in ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, threads)

# What starts tests in the background lets them ignore Ctrl-C, and all that they start inherits it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402

from kscl.registry import IMPORT_VARIABLE  # noqa: E402
from kscl.runtime.cpu import avoid_broken_amx  # noqa: E402
from kscl.runtime.logs import reset_logging  # noqa: E402

avoid_broken_amx()  # some tests compute in bf16 in this process, as a tool does after the same call


@pytest.fixture(autouse=True)
def imported_by_nobody_else(monkeypatch):
    """Forget the modules that a tool was told to import in this process."""
    monkeypatch.setenv(IMPORT_VARIABLE, "")


@pytest.fixture(autouse=True)
def quiet_logger():
    """Remove the logging that a tool has set up in this process."""
    yield
    reset_logging()
