"""What SLURM says about the jobs of a suite: squeue, sbatch and scancel, never sacct."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kscl.errors import KsclError

FORMAT = "%i|%T|%r|%o"  # job, state, reason, script
# Every other state is that of a job which runs, or will.
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
}
WAITS_AFTER_REQUEUE = "BeginTime"
AT_WORK = ("RUNNING", "COMPLETING")


class Job(NamedTuple):
    """A job that runs, or will."""

    number: str
    state: str
    reason: str


def active_jobs() -> dict[Path, Job]:
    """Return this user's jobs that have not ended, by the path of their script."""
    return parse(_call("squeue", "--me", "--noheader", "--states=all", f"--format={FORMAT}"))


def parse(text: str) -> dict[Path, Job]:
    """Read what squeue has printed."""
    found: dict[Path, Job] = {}
    for line in text.splitlines():
        number, state, reason, script = line.split("|", 3)
        if state not in ENDED:
            found[Path(script)] = Job(number, state, reason)
    return found


def submit(script: Path) -> str:
    """Submit a script and return the number of its job."""
    return _call("sbatch", "--parsable", str(script)).strip().split(";")[0]  # ;CLUSTER may follow


def cancel(numbers: Sequence[str]) -> None:
    """Cancel jobs."""
    if numbers:
        _call("scancel", *numbers)


def _call(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise KsclError(
            f"{command[0]} is not installed here, so there is no SLURM to ask. Use a machine that "
            "submits jobs, or leave --slurm out."
        ) from error
    if done.returncode:
        raise KsclError(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout
