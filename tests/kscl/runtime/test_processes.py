"""A request to stop, and loader workers that end only with the process that they load for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from torch.utils.data import Dataset

from kscl.data.loader import load_in_workers
from kscl.runtime import processes
from kscl.runtime.processes import stop_requests
from tests.helpers.commands import run
from tests.helpers.runs import is_alive, wait_until

linux = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux")
BATCHES = [[(0, 0)], [(0, 1)]] * 50


def test_a_second_sigterm_is_taken_for_the_first_as_a_scheduler_and_a_launcher_send_one_each():
    with stop_requests() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop
        assert stop.exit_code == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_interrupts_at_once(monkeypatch, number):
    if number == signal.SIGTERM:
        monkeypatch.setattr(processes, "ECHO_SECONDS", -1.0)  # as if it came later
    with stop_requests() as stop:
        os.kill(os.getpid(), number)
        assert stop
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


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
from tests.kscl.runtime.test_processes import BATCHES, Images, load_in_workers
multiprocessing.set_start_method("forkserver")
assert len(set(load_in_workers(Images(), BATCHES, 2))) == 2
"""


@linux
@pytest.mark.full
def test_workers_share_the_index_though_python_starts_processes_by_a_fork_server():
    done = run(sys.executable, "-W", "ignore", "-c", FORK_SERVER)
    assert done.returncode == 0, done.stderr[-2000:]


@linux
def test_a_worker_outlives_signals_of_others_and_ends_by_those_of_its_own_process():
    batches = iter(load_in_workers(Images(), BATCHES, 1))
    worker = next(batches)
    others = f"import os; [os.kill({worker}, number) for number in (2, 15)]"
    subprocess.run([sys.executable, "-c", others], check=True)
    assert {next(batches) for _ in range(50)} == {worker}
    os.kill(worker, signal.SIGTERM)
    wait_until(lambda: not is_alive(worker), 30)
