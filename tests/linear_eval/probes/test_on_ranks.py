"""Probes on two ranks: the numbers of one process, and both stop together."""

from __future__ import annotations

import datetime
import os
import signal
import time

import pytest
from torch.distributed.distributed_c10d import _set_pg_timeout

from kscl.benchmark.leaderboard.rows import build_board
from kscl.errors import KsclError
from kscl.records.record import read_record
from kscl.run.engine import Flags, run
from kscl.runtime.distributed import any_rank, rank
from kscl.runtime.launch import launch
from linear_eval.probe import probe_of
from linear_eval.probes import cached, linear_suite
from linear_eval.probes.cached import Cached
from linear_eval.probes.knn import Knn
from tests.helpers.data.digits import config, write_digits

pytestmark = pytest.mark.full

LIMIT = 2  # seconds that a collective may take
FLAGS = Flags(auto_resume=True, allow_world_size_change=True)
CACHED = ("PROBE", "cached", "SOLVER.SCHEDULE", "cosine")
FINETUNE = ("PROBE", "finetune", "FINETUNE.TRUNK_LR", 0.001, "FINETUNE.HEAD_LR", 0.05)
FINETUNE += ("INPUT.SIZE", 48, "INPUT.RESIZE", 48, "SOLVER.EPOCHS", 2, "SOLVER.MILESTONES", "[1]")
JOBS = {
    "online": (),
    "cached": CACHED,
    "again": (*CACHED, "SEED", 1),
    "knn": ("PROBE", "knn"),
    "finetune": (*FINETUNE, "SOLVER.BATCH_SIZE", 26),  # the last batch is smaller
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("digits"), train=8, val=2)


def run_probe(cfg) -> int:
    return run(probe_of(cfg), FLAGS)


def run_all(jobs) -> int:
    """Run one probe after the other; work of rank 0 takes longer than a collective may."""
    _set_pg_timeout(datetime.timedelta(seconds=LIMIT), None)
    any_rank(False)
    if rank() == 0:
        Cached.fit = after_a_while(Cached.fit)
        Knn.outcomes = after_a_while(Knn.outcomes)
    *others, refused = jobs
    with pytest.raises(KsclError, match=r"SOLVER\.BATCH_SIZE"):
        run_probe(refused)
    return max(run_probe(job) for job in others)


def after_a_while(work):
    def slow(*args):
        time.sleep(LIMIT + 1)
        return work(*args)

    return slow


def test_two_ranks_learn_what_one_does(digits, tmp_path):
    def job(name: str, *more: object):
        return config(digits, tmp_path / name, *JOBS[name.split("-")[0]], *more)

    # With one image left, one rank would have none to normalize.
    refused = job("finetune-refused", "SOLVER.BATCH_SIZE", 79)
    assert launch(run_all, [*(job(f"{name}-two") for name in JOBS), refused], num_gpus=2) == 0
    found = {}
    for name in JOBS:
        if name != "again":
            assert run_probe(job(name)) == 0
            found[name] = [
                read_record(tmp_path / folder / "record.json") for folder in (name, f"{name}-two")
            ]
    assert all(two.details["processes"] == 2 for _, two in found.values())
    for name in ("cached", "knn"):
        one, two = found[name]
        assert one.metrics == two.metrics
        assert one.details.get("sweep") == two.details.get("sweep")
    for name in ("online", "finetune"):
        one, two = (record.details["curves"]["train_loss"] for record in found[name])
        assert two == pytest.approx(one, abs=1e-4)
    # Fine-tuning on two processes is another protocol: a board does not average the two.
    assert [record.protocol.definition["processes"] for record in found["finetune"]] == [1, 2]
    (row,) = build_board([tmp_path / "finetune", tmp_path / "finetune-two"]).rows
    assert [result.n_finetune for result in row.results.values()] == [1, 1]


def run_and_stop(jobs) -> int:
    """Ask rank 0 to stop while it fits alone and the other one waits."""
    if rank() == 0:
        for module in (cached, linear_suite):
            module.fit_logistic = after_a_signal(module.fit_logistic)
    (code,) = {run_probe(job) for job in jobs}
    return code


def after_a_signal(work):
    def stopped(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return work(*args)

    return stopped


def test_a_stop_while_one_process_fits_ends_both_ranks_and_resumes(digits, tmp_path):
    probes = {
        "cached": ("CACHED.METHOD", "lbfgs", "CACHED.L2", "[0.01, 0.1]"),
        "linear_suite": (
            *("LINEAR_SUITE.WEIGHT_DECAYS", "[0.1, 1.0]"),
            *("SETS.digits", f"{{train: {digits}/train, test: {digits}/val}}"),
        ),
    }
    jobs = {
        (probe, name): config(digits, tmp_path / probe / name, "PROBE", probe, *more)
        for probe, more in probes.items()
        for name in ("whole", "stopped")
    }
    stopped = [job for (_, name), job in jobs.items() if name == "stopped"]
    assert launch(run_and_stop, stopped, num_gpus=2) == 128 + signal.SIGTERM
    assert not list(tmp_path.rglob("record.json"))
    for job in jobs.values():
        assert run_probe(job) == 0
    for probe in probes:
        whole, stopped = (
            read_record(tmp_path / probe / name / "record.json") for name in ("whole", "stopped")
        )
        assert stopped.metrics == pytest.approx(whole.metrics)
