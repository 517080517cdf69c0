"""Processes end with those that they work for; nothing trains on alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kscl.run.checkpoint import CHECKPOINT_FOLDER, find_checkpoints
from tests.helpers.commands import ROOT
from tests.helpers.runs import (
    Run,
    children,
    end_all,
    is_alive,
    wait_until,
)

pytestmark = pytest.mark.full

TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
def test_loader_workers_end_with_a_killed_run(tmp_path, images):
    run = Run(tmp_path / "run", images, "SOLVER.EPOCHS", 1000, "DATA.NUM_WORKERS", 2)
    (process,) = run.start()
    try:
        wait_until(lambda: bool(find_checkpoints(run.folder / CHECKPOINT_FOLDER)), 200)
        started = children(process.pid)
        assert len(started) >= 2, started
    finally:
        end_all([process])
    try:
        wait_until(lambda: not any(map(is_alive, started)), 60)
    finally:
        for pid in filter(is_alive, started):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
def test_ranks_and_their_loader_workers_end_when_torchrun_is_killed(tmp_path, images):
    run = Run(tmp_path / "run", images, "SOLVER.EPOCHS", 1000, "DATA.NUM_WORKERS", 1)
    command = [*TORCHRUN, "--nproc-per-node", "2", str(ROOT / "tools" / "pretrain.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with run.log.open("w") as log:
        torchrun = subprocess.Popen(
            [*command, *run.command()], stdout=log, stderr=log, cwd=ROOT, env=environment
        )
    try:
        wait_until(lambda: bool(find_checkpoints(run.folder / CHECKPOINT_FOLDER)), 300)
        started = children(torchrun.pid)
        assert len(started) >= 4, run.log.read_text()  # two ranks, each with a worker
    finally:
        torchrun.kill()
        torchrun.wait()
    try:
        wait_until(lambda: not any(map(is_alive, started)), 60)
    finally:
        for pid in filter(is_alive, started):
            os.kill(pid, signal.SIGKILL)
