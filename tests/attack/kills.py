"""Kill a tool at random moments, resume it each time, and compare the end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path

from tests.attack.chain import TWO_RANKS, Chain, metrics
from tests.attack.outcome import FAILED, REFUSED, judge
from tests.attack.processes import PATIENCE, finish_program, start_program
from tests.helpers.chain import smoke_suite

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
MOST_KILLS = 4
KILLED = (
    *("pretrain", f"pretrain{TWO_RANKS}", "detection", f"detection{TWO_RANKS}"),
    *("knn", "suite"),
)


def kill(chain: Chain, kind: str, chance: random.Random, place: Path) -> tuple[str, str]:
    """Return the outcome, and what to look at if it is a failure."""
    log = place / "log"
    if kind == "suite":  # which draws its data itself
        target = place / "output"
        suite = smoke_suite(place)
        job = chain.jobs["suite"].with_path(chain.folder / "suite.yaml", suite)
    else:
        target = place / "run"
        job = chain.jobs[kind].into(target)
    for _ in range(chance.randint(1, MOST_KILLS)):
        process = start_program(job.program, log)
        try:
            process.wait(chance.uniform(0, 1.2 * chain.seconds[kind]))
            break
        except subprocess.TimeoutExpired:
            which = chance.choice(SIGNALS)
            os.killpg(process.pid, which) if chance.random() < 0.5 else process.send_signal(which)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return FAILED, f"did not end after {which.name}"
    code, _ = finish_program(job.program, log)
    outcome = judge(code, log, metrics(target) == metrics(chain.jobs[kind].output))
    return (FAILED if outcome == REFUSED else outcome), log.read_text()[-1500:]
