"""Loader workers share what is loaded from, and end only with the process that they load for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from torch.utils.data import Dataset

from kscl.data.loader import load_in_workers
from tests.helpers.commands import ROOT
from tests.helpers.runs import is_alive, wait_until

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux"),
]

BATCHES = [[(0, 0)], [(0, 1)]] * 50


class Images(Dataset):
    """Answers with the number of the worker's process; refuses to be copied into a worker."""

    def __getitem__(self, index: tuple[int, int]) -> int:
        return os.getpid()

    def __getitems__(self, batch: list[tuple[int, int]]) -> int:
        return os.getpid()

    def __reduce__(self):
        raise AssertionError("The images would be copied into every worker.")


FORK_SERVER = """
import multiprocessing
from tests.kscl.runtime.test_workers import BATCHES, Images, load_in_workers
multiprocessing.set_start_method("forkserver")
assert len(set(load_in_workers(Images(), BATCHES, 2))) == 2
"""


def test_workers_share_the_index_though_python_starts_processes_by_a_fork_server():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK_SERVER],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_worker_outlives_signals_of_others_and_ends_by_those_of_its_own_process():
    batches = iter(load_in_workers(Images(), BATCHES, 1))
    worker = next(batches)
    others = f"import os; [os.kill({worker}, number) for number in (2, 15)]"
    subprocess.run([sys.executable, "-c", others], check=True)
    assert {next(batches) for _ in range(50)} == {worker}
    os.kill(worker, signal.SIGTERM)
    wait_until(lambda: not is_alive(worker), 30)
