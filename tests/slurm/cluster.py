"""A SLURM under one folder, for as long as a block lasts.

It has two nodes on this machine: one with a pretend GPU, and one beside it for jobs on two nodes.
Jobs of the partition urgent preempt others.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "srun")
SYSTEM_FOLDERS = ("/usr/sbin", "/usr/bin")
START_SECONDS = 60.0
BESIDE = "localhost"  # the second node; a name that leads to this machine, too

# cred_expire: a job that is queued again waits so long, by default two minutes.
SLURM_CONF = """\
ClusterName=kscl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=5,bf_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MinJobAge=300
KillWait=10
GresTypes=gpu
NodeName=DEFAULT RealMemory=4000 State=UNKNOWN
NodeName={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 Gres=gpu:1
NodeName={beside} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
PartitionName=both Nodes={host},{beside} MaxTime=INFINITE State=UP GraceTime=60
PartitionName=urgent Nodes={host},{beside} MaxTime=INFINITE State=UP PriorityTier=9
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""


def what_is_missing() -> list[str]:
    """Return the programs of SLURM that are not installed."""
    return [name for name in PROGRAMS if not any(Path(f, name).exists() for f in SYSTEM_FOLDERS)]


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start munge, the controller and the nodes; yield the environment of the clients."""
    folder.mkdir(mode=0o755, parents=True)
    host = socket.gethostname().split(".")[0]
    for name in ("state", f"spool-{host}", f"spool-{BESIDE}"):
        (folder / name).mkdir()
    config = SLURM_CONF.format(
        host=host,
        beside=BESIDE,
        folder=folder,
        ports=[_free_port() for _ in range(3)],
        user=os.environ.get("USER", "root"),
    )
    (folder / "slurm.conf").write_text(config)
    (folder / "gres.conf").write_text(f"NodeName={host} Name=gpu File=/dev/null\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    environment["PATH"] = os.pathsep.join([environment.get("PATH", ""), *SYSTEM_FOLDERS])
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid"}
    files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    munge = [f"--{option}={folder / name}" for option, name in files.items()]
    commands = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D", "-f", str(folder / "slurm.conf")],
        *(["slurmd", "-D", "-f", str(folder / "slurm.conf"), "-N", n] for n in (host, BESIDE)),
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("ab") as output:
                started.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=output)
                )
            time.sleep(1)
        _wait_for_the_nodes(environment, folder)
        yield environment
    finally:
        _end_all_jobs(environment)
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


def _wait_for_the_nodes(environment: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        command = ["sinfo", "--noheader", "--Node", "--format=%T"]
        shown = subprocess.run(command, env=environment, capture_output=True, text=True)
        if set(shown.stdout.split()) == {"idle"}:
            return
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text()[-1000:] for path in sorted(folder.glob("*.log")))
            raise RuntimeError(f"The nodes are not idle: {shown.stdout}{shown.stderr}\n{logs}")
        time.sleep(0.5)


def _end_all_jobs(environment: dict[str, str]) -> None:
    """Cancel what a failed test has left: processes of jobs outlive the daemons."""
    deadline = time.monotonic() + START_SECONDS
    ask = ["squeue", "--noheader", "--format=%i"]
    while time.monotonic() < deadline:
        jobs = subprocess.run(ask, env=environment, capture_output=True, text=True).stdout.split()
        if not jobs:
            return
        subprocess.run(["scancel", *jobs], env=environment, capture_output=True)
        time.sleep(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
