"""Ranks that start, wait, fail and end, in real processes: nobody waits for what never comes."""

from __future__ import annotations

import atexit
import datetime
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from kscl.errors import KsclError
from kscl.runtime.distributed import any_rank, on_first_rank, rank
from kscl.runtime.launch import launch
from tests.helpers.commands import ROOT
from tests.helpers.ranks import joined

pytestmark = pytest.mark.full

REASON = "picture.jpg cannot be read"
FOREVER = 600  # seconds; longer than a test waits
LIMIT = 2  # seconds that a collective may take


def block(*_: object) -> None:
    time.sleep(FOREVER)


def fail_on_rank_1(_: object) -> int:
    """Fail where ending the process group, and what Python does at exit, wait for the others."""
    dist.destroy_process_group = block
    atexit.register(block)
    if rank() == 1:
        raise KsclError(REASON)
    dist.all_reduce(torch.zeros(1))  # which rank 1 never joins
    return 0


def fail_on_rank_0(_: object) -> int:
    """Fail on rank 0 before the others have anything to do."""
    atexit.register(block)

    def work() -> None:
        raise KsclError(REASON)

    on_first_rank(work)
    return 0


def end_by_the_system_on_rank_1(_: object) -> int:
    """Be killed, as where memory has run out."""
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LIMIT)
    return 0


def leave_early(_: object) -> int:
    """Let rank 0 work alone, longer than a collective of the default group may take."""
    _set_pg_timeout(datetime.timedelta(seconds=LIMIT), None)
    any_rank(False)
    for _ in range(2):  # two seeds of a probe
        on_first_rank(lambda: None)
        if rank() == 0:
            time.sleep(LIMIT + 1)
    return 0


SLOW_TO_IMPORT = """
import sys, time
from kscl.runtime.launch import launch
if __name__ == "__mp_main__":  # in a rank, which Ctrl-C in a terminal reaches as well
    print("importing", flush=True)
    time.sleep(2)
def work(_):
    time.sleep(600)
if __name__ == "__main__":
    sys.exit(launch(work, None, 2))
"""


def test_ctrl_c_while_ranks_import_ends_all_without_a_traceback(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SLOW_TO_IMPORT)
    command = [sys.executable, "-W", "ignore", str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=env, start_new_session=True, **piped)
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in errors


def test_a_rank_that_fails_alone_says_why_though_ending_the_group_would_wait():
    with pytest.raises(KsclError, match=REASON):
        launch(fail_on_rank_1, None, 2)


def test_a_rank_that_the_system_has_ended_is_named_with_advice_for_every_tool():
    with pytest.raises(KsclError, match=r"Rank 1 was killed by SIGKILL.*smaller batch") as caught:
        launch(end_by_the_system_on_rank_1, None, 2)
    assert "SOLVER" not in str(caught.value)  # the tools' keys differ


def test_a_rank_of_torchrun_that_fails_alone_says_why_though_ending_the_group_would_wait(tmp_path):
    _, (code, text) = joined(fail_on_rank_1, tmp_path)
    assert code == 2
    assert f"error: {REASON}" in text.splitlines()


def test_what_fails_on_rank_0_is_said_once_and_ends_all_ranks(tmp_path):
    done = joined(fail_on_rank_0, tmp_path)
    assert [code for code, _ in done] == [2, 2]
    assert [text.count(REASON) for _, text in done] == [1, 0]


def test_ranks_wait_for_rank_0_longer_than_a_collective_may_take(tmp_path):
    done = joined(leave_early, tmp_path)
    assert [code for code, _ in done] == [0, 0], done
