"""Run tiny suites on a real SLURM on this machine; `make test-slurm`.

Stages are stopped, preempted, queued again, made to fail and cancelled; one runs on two nodes. The
numbers must be those of a run without SLURM.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from kscl.runtime.logs import LOG_FILE
from tests.helpers.chain import numbers
from tests.helpers.commands import ROOT
from tests.slurm.cluster import cluster, what_is_missing
from tests.slurm.suite import ON_TWO_NODES, write_profile, write_suite

PACKAGES = ("slurm-wlm", "munge")
MINUTES = 15.0
OF_THE_CLOCK = ("minutes_per_epoch", "images_per_second", "views_per_second")
POLL_SECONDS = 2.0
STOPPED_PRETRAINING = "kscl/seed0/pretrain"
FAILED_PRETRAINING = "short/seed0/pretrain"


def main() -> int:
    """Run the whole test and return the exit code."""
    begun = time.monotonic()
    if reason := install():
        print(f"SLURM cannot be tested here: {reason}", file=sys.stderr)
        return 1
    folder = Path(tempfile.mkdtemp(prefix="kscl-slurm-"))
    folder.chmod(0o755)
    try:
        with cluster(folder / "cluster") as environment:
            suite = Suite(folder / "one", environment, processes=1)
            suite.resume_and_compare(stages=10)
            suite.fail_and_cancel()
            pair = Suite(folder / "two", environment, processes=2, **ON_TWO_NODES)
            pair.resume_and_compare(stages=4, preempt=True)
    except BaseException:
        print(f"All files are kept in {folder}.", file=sys.stderr)
        raise
    shutil.rmtree(folder)
    print(f"Passed in {(time.monotonic() - begun) / 60:.1f} minutes.")
    return 0


def install() -> str:
    """Install SLURM if it is missing; return why that is not possible, or nothing."""
    if not what_is_missing():
        return ""
    if os.geteuid() or shutil.which("apt-get") is None:
        names = ", ".join(what_is_missing())
        return f"{names} are missing. As root on Debian, they would be installed by apt-get."
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], env=quiet)
    done = subprocess.run(command, env=quiet, capture_output=True, text=True)
    return f"{' '.join(command)} failed: {done.stderr.strip()}" if done.returncode else ""


class Suite:
    """A suite twice: on SLURM, and without it."""

    def __init__(
        self, folder: Path, environment: dict[str, str], processes: int, **profile: object
    ) -> None:
        self.folder = folder
        self.environment = {**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.on_slurm, self.local = (
            write_suite(folder / name, processes) for name in ("slurm", "local")
        )
        self.profile = write_profile(folder / "profile.yaml", **profile)

    def resume_and_compare(self, stages: int, preempt: bool = False) -> None:
        """Submit, stop a stage in the middle, let it resume, and compare."""
        begun = time.monotonic()
        told = self.submit()
        check(f"Submitted {stages} of {stages} stages" in told, told)
        check(f"Submitted 0 of {stages}" in self.submit(), "a second call must submit nothing")
        self.stop_in_the_middle(STOPPED_PRETRAINING)
        self.wait_for_requeue()
        if preempt:
            self.preempt(STOPPED_PRETRAINING)
            self.wait_for_requeue()
        self.tool(self.local, "--skip-check")  # while SLURM lets the job wait
        self.wait(lambda: set(self.status().values()) == {"done"}, "the suite", MINUTES)
        self.compare(stops=1 + preempt)
        say(f"{(time.monotonic() - begun) / 60:.1f} minutes.")

    def submit(self) -> str:
        return self.tool(self.on_slurm, "--slurm", str(self.profile), "--skip-check")

    def wait_for_requeue(self) -> None:
        self.wait(lambda: self.status()[STOPPED_PRETRAINING] == "queued again", "the requeue", 2)
        say(f"{STOPPED_PRETRAINING} has saved its state and is queued again.")

    def compare(self, stops: int) -> None:
        """Compare boards and records of both ways; only times may differ."""
        on_slurm, local = (numbers(self.folder / name) for name in ("slurm", "local"))
        timed = {key for key in local if key[-1] in OF_THE_CLOCK}
        check(bool(local.keys() - timed), "there must be numbers to compare")
        for key in local.keys() | on_slurm.keys():
            same = key in timed or local.get(key) == on_slurm.get(key)
            check(same, f"{key}: {local.get(key)} without SLURM, {on_slurm.get(key)} with it")
        records = [metrics_of(self.folder / name) for name in ("slurm", "local")]
        check(records[0] == records[1], f"the records differ: {records}")
        log = next((self.folder / "slurm/output").glob(f"{STOPPED_PRETRAINING}-*/{LOG_FILE}"))
        steps = [
            re.findall(text, log.read_text())
            for text in (r"Step (\d+) is saved", r"Resuming after step (\d+)")
        ]
        check(len(steps[0]) == stops and steps[0] == steps[1], f"saved, resumed after: {steps}")
        say(f"Agree: numbers of the board {len(local) - len(timed)}, records {len(records[0])}.")

    def fail_and_cancel(self) -> None:
        """Let a new contender run out of retries; the board must show the others."""
        suite = yaml.safe_load(self.on_slurm.read_text())
        suite["contenders"]["short"] = suite["contenders"]["kscl"] | {"seeds": [0]}
        suite["contenders"]["short"]["overrides"] = {
            **suite["contenders"]["kscl"]["overrides"],
            "METHOD.RHO": 0.9,
        }
        self.on_slurm.write_text(yaml.safe_dump(suite))
        write_profile(self.profile, retries=0)
        check("Submitted 6 of 15" in self.submit(), "only what is new must be submitted")
        self.stop_in_the_middle(FAILED_PRETRAINING)
        self.wait(lambda: self.status().get("leaderboard") == "done", "the last board", 3)
        states = self.status()
        check(states[FAILED_PRETRAINING] == "failed", str(states))
        check(states["short/seed0/detection"] == "not run", str(states))
        told = self.tool(self.on_slurm, "--status", code=1)
        check("needs more time than 0 retries" in told, told)
        check("Submitted 6 of 15" in self.submit(), "what failed must be submitted again")
        self.tool(self.on_slurm, "--cancel")
        self.wait(lambda: not self.jobs(), "the end of all jobs", 1)
        check(self.status()[FAILED_PRETRAINING] == "to do", "a cancelled stage is to do")
        say("A stage out of retries failed, the board was made, and the rest was cancelled.")

    def stop_in_the_middle(self, name: str) -> None:
        """Send the signal that SLURM sends before the time limit, once there is a checkpoint."""
        # Agents of two nodes that are one machine may meet only after torchrun's 300 seconds.
        self.wait(lambda: bool(self.newest(name)), f"a checkpoint of {name}", 8)
        number = next(job for job, stage in self.jobs().items() if stage in name.replace("/", "_"))
        subprocess.run(
            ["scancel", "--batch", "--signal=USR1", number], env=self.environment, check=True
        )

    def preempt(self, name: str) -> None:
        """Submit a job that needs the nodes at once, when the stage has resumed and gone on."""
        before = self.newest(name)
        self.wait(lambda: self.newest(name) > before, f"a further checkpoint of {name}", 5)
        command = ["sbatch", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=true"]
        subprocess.run(command, env=self.environment, check=True, stdout=subprocess.DEVNULL)

    def newest(self, name: str) -> str:
        """Return the name of the newest checkpoint of a pretraining, which begins with its step."""
        found = (self.folder / "slurm/output").glob(f"{name}-*/checkpoints/checkpoint-*")
        return max((path.name for path in found), default="")

    def jobs(self) -> dict[str, str]:
        """Return the jobs that have not ended, and their stages."""
        command = ["squeue", "--noheader", "--format=%i %j"]
        lines = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        words = [line.split() for line in lines.stdout.splitlines()]
        return {number: name.rpartition("-")[0] for number, name in words}

    def status(self) -> dict[str, str]:
        """Return how far each stage is, as the tool shows it."""
        told = self.tool(self.on_slurm, "--status", code=None)
        rows = [line.split(maxsplit=1) for line in told.splitlines() if "/seed" in line[:40]]
        rows += [line.split(maxsplit=1) for line in told.splitlines() if line[:11] == "leaderboard"]
        states = ("done", "queued again", "queued", "running", "failed", "not run", "to do")
        return {
            name: next((state for state in states if rest.strip().startswith(state)), rest)
            for name, rest in rows
        }

    def wait(self, condition: Callable[[], bool], what: str, minutes: float) -> None:
        deadline = time.monotonic() + minutes * 60
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come in {minutes} minutes\n{self.status()}")
            time.sleep(POLL_SECONDS)

    def tool(self, suite: Path, *words: str, code: int | None = 0) -> str:
        """Run the tool and return what it prints."""
        command = [sys.executable, "-W", "ignore", str(ROOT / "tools/run_suite.py"), str(suite)]
        done = subprocess.run(
            [*command, *words], env=self.environment, capture_output=True, text=True, cwd=ROOT
        )
        check(code is None or done.returncode == code, done.stdout + done.stderr)
        return done.stdout


def metrics_of(folder: Path) -> dict[str, dict[str, float]]:
    """Return the metrics of every record by the name of its stage, without those of the clock."""
    found = {}
    for path in folder.rglob("record.json"):
        stage = path.relative_to(folder / "output").as_posix()
        metrics = json.loads(path.read_text())["metrics"]
        found[stage.partition("-")[0]] = {
            name: value for name, value in metrics.items() if name not in OF_THE_CLOCK
        }
    return found


def check(good: bool, message: str) -> None:
    """Raise if something is not as it must be."""
    if not good:
        raise AssertionError(message)


def say(text: str) -> None:
    """Print how far the test is."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
