"""What all tests share: one core per test process, and one small chain per session.

`make test` runs the tests without a mark below, two processes side by side. `make test-all` adds
those marked `full`: kills, ranks, the page in a browser, the README's commands, all protocols,
whatever takes several seconds. Tests marked `slow` run in neither.

Expensive things are made once per session, for all workers: read them, or copy what you change.
- `chain`: shapes -> backbone -> probe, converted weights -> detector -> board (helpers/chain.py).
- `once(tmp_path_factory, name, make)` of helpers/chain.py makes any other folder once.
"""

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

import hypothesis  # noqa: E402
import pytest  # noqa: E402

from kscl.registry import IMPORT_VARIABLE  # noqa: E402
from kscl.runtime.logs import reset_logging  # noqa: E402
from kscl.runtime.machine import avoid_broken_amx  # noqa: E402
from tests.helpers.chain import Chain, make_chain, once  # noqa: E402

hypothesis.settings.register_profile("any_cpu", deadline=None)  # no verdict depends on the CPU
hypothesis.settings.load_profile("any_cpu")
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


@pytest.fixture(scope="session")
def chain(tmp_path_factory) -> Chain:
    """The smallest suite, run to its end by its command; nobody may change it."""
    return Chain(once(tmp_path_factory, "chain", make_chain))
