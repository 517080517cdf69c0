"""A scheduler signals all processes of a job at once: launcher, ranks and loader workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kscl.engine.metrics_log import METRICS_FILE
from tests.helpers.commands import ROOT
from tests.helpers.runs import Run, children, wait_until

pytestmark = pytest.mark.full

PYTHON = [sys.executable, "-W", "ignore"]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone"]
LAUNCHERS = {
    "one process": [*PYTHON, "tools/pretrain.py"],
    "two processes": [*PYTHON, "tools/pretrain.py", "--num-gpus", "2"],
    "torchrun": [*TORCHRUN, "--nproc-per-node", "2", "tools/pretrain.py"],
}
STEPS = 4000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_saves_its_step_when_all_of_its_processes_are_told_to_stop(
    tmp_path, images, launcher
):
    only_when_stopped = ["CHECKPOINT.PERIOD_STEPS", 0, "CHECKPOINT.PERIOD_EPOCHS", 9999]
    run = Run(
        *(tmp_path / "run", images, "SOLVER.EPOCHS", STEPS // 6, "DATA.NUM_WORKERS", 2),
        *only_when_stopped,
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with run.log.open("w") as log:
        process = subprocess.Popen(
            [*LAUNCHERS[launcher], *run.command()],
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=environment,
        )
    try:
        metrics = run.folder / METRICS_FILE
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, 120)
        all_of_them = [process.pid, *children(process.pid)]
        assert len(all_of_them) >= 3  # with the loader workers
        for pid in all_of_them:
            os.kill(pid, signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
    told = run.log.read_text()
    assert "--resume continues" in told, told[-3000:]
    assert 1 <= run.state()["step"] < STEPS
