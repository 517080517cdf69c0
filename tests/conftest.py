"""Give each test process one core: two of them run side by side (make test)."""

from __future__ import annotations

import os

import pytest

from kscl.runtime.logs import reset_logging

if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")


@pytest.fixture(autouse=True)
def quiet_logger():
    """Remove the logging that a tool has set up in this process."""
    yield
    reset_logging()
