"""A probe that one process trains, on two ranks: the other one waits, and both stop together."""

from __future__ import annotations

import datetime
import os
import signal
import time

import pytest
from torch.distributed.distributed_c10d import _set_pg_timeout

from kscl.records.record import read_record
from kscl.run.engine import Flags
from kscl.runtime.distributed import any_rank, rank
from kscl.runtime.launch import launch
from linear_eval.commands.linear_eval import run_probe
from linear_eval.probes import cached, linear_suite
from linear_eval.probes.cached import Cached
from linear_eval.probes.knn import Knn
from tests.helpers.data.digits import config, write_digits

pytestmark = pytest.mark.full

LIMIT = 2  # seconds that a collective may take
FLAGS = Flags(auto_resume=True, allow_world_size_change=True)


def run_slowly(jobs) -> int:
    """Let the part of rank 0 alone take longer than a collective of all ranks may."""
    _set_pg_timeout(datetime.timedelta(seconds=LIMIT), None)
    any_rank(False)
    if rank() == 0:
        Cached.fit = after_a_while(Cached.fit)
        Knn.outcomes = after_a_while(Knn.outcomes)
    return max(run_probe(job) for job in jobs)


def after_a_while(work):
    def slow(*args):
        time.sleep(LIMIT + 1)
        return work(*args)

    return slow


@pytest.mark.slow
def test_probes_of_one_process_end_on_two_ranks_one_after_the_other(tmp_path):
    digits = write_digits(tmp_path / "digits", train=4, val=2)
    cached = ("PROBE", "cached", "SOLVER.SCHEDULE", "cosine")
    words = {"seed0": cached, "seed1": (*cached, "SEED", 1), "knn": ("PROBE", "knn")}
    cfgs = [config(digits, tmp_path / name, *more) for name, more in words.items()]
    assert launch(run_slowly, [(cfg, FLAGS) for cfg in cfgs], num_gpus=2) == 0
    for name in words:
        assert read_record(tmp_path / name / "record.json")["details"]["processes"] == 2


def run_and_stop(job) -> int:
    """Ask rank 0 to stop while it fits alone and the other one waits."""
    if rank() == 0:
        for module in (cached, linear_suite):
            module.fit_logistic = after_a_signal(module.fit_logistic)
    return run_probe(job)


def after_a_signal(work):
    def stopped(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return work(*args)

    return stopped


@pytest.mark.parametrize("probe", ["cached", pytest.param("linear_suite", marks=pytest.mark.slow)])
def test_a_stop_while_one_process_fits_ends_both_ranks_and_resumes(tmp_path, probe):
    digits = write_digits(tmp_path / "digits", train=4, val=2)
    more = {
        "cached": ("CACHED.METHOD", "lbfgs", "CACHED.L2", "[0.01, 0.1]"),
        "linear_suite": (
            *("LINEAR_SUITE.WEIGHT_DECAYS", "[0.1, 1.0]"),
            *("SETS.digits", f"{{train: {digits}/train, test: {digits}/val}}"),
        ),
    }[probe]
    jobs = {
        name: (config(digits, tmp_path / name, "PROBE", probe, *more), FLAGS)
        for name in ("whole", "stopped")
    }
    assert run_probe(jobs["whole"]) == 0
    assert launch(run_and_stop, jobs["stopped"], num_gpus=2) == 128 + signal.SIGTERM
    assert not (tmp_path / "stopped" / "record.json").exists()
    assert run_probe(jobs["stopped"]) == 0
    whole, stopped = (read_record(tmp_path / name / "record.json") for name in jobs)
    assert stopped.metrics == pytest.approx(whole.metrics)
