"""A suite on a SLURM cluster: one job per stage, states from notes and squeue (never sacct).

A profile says what a cluster is asked for, by kind of stage. The batch script of a stage runs it,
lets it save when its time is nearly up, queues itself again, and leaves the note that it is done.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from kscl.benchmark.suite.execute import (
    DONE,
    FAILED,
    RUNNING,
    TO_DO,
    WAITS,
    State,
    file_name,
    note_path,
    program_path,
)
from kscl.benchmark.suite.progress import board_command
from kscl.benchmark.suite.spec import key_problems, stage_kinds, too_small, types_of_keys
from kscl.benchmark.suite.stages import Stage
from kscl.config import find_config, raise_problems, read_mapping
from kscl.errors import KsclError
from kscl.runtime.files import write_atomically

WITHOUT_GPU = ("shapes", "convert", "basis", "board")
FORMAT = "%i|%T|%r|%o"  # job, state, reason, script
# Every other state is that of a job which runs, or will.
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
}
WAITS_AFTER_REQUEUE = "BeginTime"
AT_WORK = ("RUNNING", "COMPLETING")
QUEUED, REQUEUED = "queued", "queued again"
SCRIPTS = "slurm"  # the folder of scripts inside the state folder
FIRST_PORT, PORTS = 20000, 10000
# To all processes on all machines. srun itself, if it is sent SIGTERM, kills them at once.
STOP_STEP = 'scancel --signal=TERM "$SLURM_JOB_ID"'

# The note is written by the job itself: nothing else watches it.
BODY = """\
note={note}
spent={spent}
{skip}if [ "${{SLURM_RESTART_COUNT:-0}}" -gt {retries} ]; then
    echo "error: {name} was queued again {retries} times (retries of the profile) and is given up."
    exit 1
fi
SECONDS=$(cat "$spent" 2>/dev/null || echo 0)
export PYTHONWARNINGS=ignore
{threads}asked=""
stage=""
stop() {{ if [ -n "$stage" ]; then {stop}; fi; }}
trap 'asked=requeue; stop' USR1
trap 'asked=stop' TERM # SLURM sends it to all processes of a job
preempted() {{ scontrol show job "$SLURM_JOB_ID" | grep -q ' PreemptTime=[0-9]'; }}
{setup}{command} &
stage=$!
if [ -n "$asked" ]; then stop; fi # the signal came during the lines above
wait "$stage"
code=$?
while kill -0 "$stage" 2>/dev/null; do # a signal ends the wait, not the stage, which is saving
    wait "$stage"
    code=$?
done
if [ "$code" -eq 0 ]; then
    echo '{{"key": "{key}", "kind": "{kind}", "seconds": '"$SECONDS"'.0}}' >"$note.$SLURM_JOB_ID"
    mv "$note.$SLURM_JOB_ID" "$note"
    rm -f "$spent"
    exit 0
fi
echo "$SECONDS" >"$spent"
# A partition's grace time begins with SIGTERM to what srun runs, and to nothing else.
if [ -z "$asked" ] && preempted; then asked=requeue; fi
if [ "$asked" = requeue ]; then
    if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {retries} ]; then
        echo "error: {name} needs more time than {retries} retries (of the profile) give."
        exit 1
    fi
    job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
    if scontrol requeue "${{job:-$SLURM_JOB_ID}}"; then exit 0; fi
fi
exit "$code"
"""


# What a cluster is asked for


@dataclass(frozen=True)
class Resources:
    """What one stage asks for; an empty value is left to the cluster."""

    # The partition.
    partition: str = ""
    # Number of machines; more than one only for stages that train.
    nodes: int = 1
    # Most GPUs per machine; a stage asks for one per process. Kinds that compute little ask for
    # none unless they say so.
    gpus_per_node: int = 0
    # Instead of gpus_per_node, such as gpu:a100:8, for clusters that want it so.
    gres: str = ""
    # Cores per machine.
    cpus: int = 0
    # Memory per machine, such as 256G.
    memory: str = ""
    # The time limit, such as "24:00:00". A stage that needs longer saves, and is queued again.
    time: str = ""


@dataclass(frozen=True)
class Profile:
    """A cluster as this project sees it."""

    # The resources of every stage.
    resources: Resources = field(default_factory=Resources)
    # What differs for a kind of stage: pretrain, shapes, convert, basis, board, or that of an
    # evaluation.
    kinds: dict[str, Resources] = field(default_factory=dict)
    # Most jobs of the suite that run at once; 0 for no limit.
    max_jobs: int = 0
    # How often a stage is queued again before it counts as failed.
    retries: int = 20
    # Seconds before the time limit at which a stage is asked to save.
    seconds_to_save: int = 120
    # Further options of sbatch, such as ["--account=vision"].
    sbatch: tuple[str, ...] = ()
    # Shell lines before every stage, such as "module load cuda".
    setup: str = ""

    def of(self, stage: Stage) -> Resources:
        """Return what a stage asks for; raise if its processes cannot run on it."""
        asked = self.kinds.get(stage.kind, self.resources)
        if not stage.num_gpus:
            return replace(asked, nodes=1)
        each, rest = divmod(stage.num_gpus, asked.nodes)
        gres, _, last = asked.gres.rpartition(":")
        most = int(last) if last.isdecimal() else (1 if asked.gres else asked.gpus_per_node)
        if rest or (most and each > most):
            raise KsclError(
                f"{stage.name} has {stage.num_gpus} processes (num_gpus of the suite), which "
                f"cannot be split evenly over the profile's {asked.nodes} machines of "
                f"{most or 'any number of'} GPUs (nodes, gpus_per_node) for the kind {stage.kind}. "
                "Change one of them."
            )
        if asked.gres:
            return replace(asked, gres=f"{gres if last.isdecimal() else asked.gres}:{each}")
        return replace(asked, gpus_per_node=min(most, each))


KEYS_OF_RESOURCES = types_of_keys(Resources)
KEYS_OF_PROFILE = types_of_keys(Profile) | {"resources": dict}


def read_profile(name: str | Path) -> Profile:
    """Return the profile in this file, or a shipped one; raise one error with all that is wrong."""
    path = find_config(name)
    values = read_mapping(path)
    raise_problems(list(_problems(values)), f"the profile {path}")
    shared = values.get("resources") or {}
    without_gpu = {**shared, "gpus_per_node": 0, "gres": "", "nodes": 1}
    given = values.get("kinds") or {}
    kinds = {
        kind: Resources(
            **((without_gpu if kind in WITHOUT_GPU else shared) | (given.get(kind) or {}))
        )
        for kind in stage_kinds()
    }
    others = {key: value for key, value in values.items() if key not in ("resources", "kinds")}
    if "sbatch" in others:
        others["sbatch"] = tuple(map(str, others["sbatch"]))
    return Profile(resources=Resources(**shared), kinds=kinds, **others)


def _problems(values: Mapping[str, Any]) -> Iterator[str]:
    yield from key_problems("the profile", values, KEYS_OF_PROFILE)
    kinds = values.get("kinds")
    parts = {"resources": values.get("resources"), **(kinds if isinstance(kinds, dict) else {})}
    for name, about in parts.items():
        if name not in ("resources", *stage_kinds()):
            yield f"kinds: {name} is not a kind of stage; choose from {', '.join(stage_kinds())}."
        elif about is not None and not isinstance(about, dict):
            yield f"{name} takes a mapping, not {about!r}."
        else:
            yield from key_problems(name, about or {}, KEYS_OF_RESOURCES)
            yield from too_small(name, about or {}, {"nodes": 1, "gpus_per_node": 0, "cpus": 0})
    yield from too_small("the profile", values, {"max_jobs": 0, "retries": 0, "seconds_to_save": 1})


# The script of a stage


def script_folder(state_dir: Path) -> Path:
    """Return where the scripts of a suite are."""
    return state_dir.absolute() / SCRIPTS


def script_path(state_dir: Path, stage: Stage) -> Path:
    """Return where the script of a stage is; SLURM knows its job by this path."""
    return script_folder(state_dir) / f"{file_name(stage)}.sh"


def log_path(state_dir: Path, stage: Stage) -> Path:
    """Return the log of a stage, the same file as without SLURM."""
    return state_dir.absolute() / f"{file_name(stage)}.log"


def batch_script(
    stage: Stage, profile: Profile, state_dir: Path, dependencies: Sequence[str], cwd: Path
) -> str:
    """Return the script; `dependencies` are clauses such as afterok:17."""
    asked = profile.of(stage)
    gpus = {"gres": asked.gres} if asked.gres else {"gpus-per-node": asked.gpus_per_node}
    options = {
        "job-name": file_name(stage),
        "chdir": cwd,
        "output": str(log_path(state_dir, stage)).replace("%", "%%"),
        "open-mode": "append",
        "signal": f"B:USR1@{profile.seconds_to_save}",
        "partition": asked.partition,
        "nodes": asked.nodes,
        "ntasks-per-node": 1,
        **gpus,
        "cpus-per-task": asked.cpus,
        "mem": asked.memory,
        "time": asked.time,
        "dependency": ",".join(dependencies),
    }
    words = [f"--{key}={value}" for key, value in options.items() if value not in ("", 0)]
    words += ["--requeue", "--kill-on-invalid-dep=yes", *profile.sbatch]
    # sbatch reads quotes from a script, but only where they must be.
    lines = ["#!/bin/bash", *("#SBATCH " + (f'"{it}"' if " " in it else it) for it in words), ""]
    threads = ""  # the line that keeps a stage to its cores, where SLURM itself does not
    if asked.cpus:
        each = max(1, asked.cpus * asked.nodes // max(1, stage.num_gpus))
        threads = f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{each}}}"\n'
    return "\n".join(lines) + BODY.format(
        note=shlex.quote(str(note_path(state_dir.absolute(), stage))),
        spent=shlex.quote(str(script_path(state_dir, stage).with_suffix(".spent"))),
        retries=profile.retries,
        name=stage.name,
        skip="" if stage.kind == "board" else 'if [ -s "$note" ]; then exit 0; fi # it is done\n',
        key=stage.key,
        kind=stage.kind,
        threads=threads,
        setup=f"{profile.setup.strip()}\n" if profile.setup.strip() else "",
        command=_command(stage, asked, profile.seconds_to_save),
        stop='kill -TERM "$stage"' if asked.nodes == 1 else STOP_STEP,
    )


def _command(stage: Stage, asked: Resources, seconds_to_save: int) -> str:
    if stage.kind == "board":
        return board_command(stage, stage.runner)
    if asked.nodes == 1:
        return shlex.join([*stage.runner, *stage.arguments])
    words = [*stage.runner, *replace(stage, num_gpus=0).arguments]
    # Since SLURM 22.05, srun does not take over the cores per task that its job asks for.
    cores = f"--cpus-per-task={asked.cpus} " if asked.cpus else ""
    # One agent per machine. The port differs between jobs that share a machine.
    return (
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={seconds_to_save} # not torchrun's 30 s\n"
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        f"srun --kill-on-bad-exit=1 {cores}{shlex.quote(program_path('torchrun'))} "
        f"--nnodes {asked.nodes} --nproc-per-node {stage.num_gpus // asked.nodes} "
        "--rdzv-backend c10d "
        f'--rdzv-endpoint "$head:$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))" '
        '--rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" '
        f"--no-python {shlex.join(words)}"
    )


# What SLURM says


class Job(NamedTuple):
    """A job that runs, or will."""

    number: str
    state: str
    reason: str


def active_jobs() -> dict[Path, Job]:
    """Return this user's jobs that have not ended, by the path of their script."""
    return parse_jobs(_call("squeue", "--me", "--noheader", "--states=all", f"--format={FORMAT}"))


def parse_jobs(text: str) -> dict[Path, Job]:
    """Read what squeue has printed."""
    found: dict[Path, Job] = {}
    for line in text.splitlines():
        number, state, reason, script = line.split("|", 3)
        if state not in ENDED:
            found[Path(script)] = Job(number, state, reason)
    return found


def _call(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise KsclError(
            f"{command[0]} is not installed here, so SLURM cannot be reached. Use a machine that "
            "submits jobs, or leave --slurm out."
        ) from error
    if done.returncode:
        raise KsclError(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


# Submit what is missing, show it, cancel it


Jobs = Mapping[Path, Job]


def set_statuses(states: Sequence[State], state_dir: Path, jobs: Jobs) -> None:
    """Complete what the notes say: what runs, waits, or has ended without a note."""
    by_stage = {id(state.stage): state for state in states}
    for state in states:
        script = script_path(state_dir, state.stage)
        job = jobs.get(script)
        is_board = state.stage.kind == "board"
        needs = {by_stage[id(stage)].status for stage in state.stage.needs}
        if job is not None:
            waits = REQUEUED if job.reason == WAITS_AFTER_REQUEUE else QUEUED
            state.status = RUNNING if job.state in AT_WORK else waits
        elif is_board and note_path(state_dir, state.stage).exists():
            state.status = DONE
        elif state.status == TO_DO and not is_board and needs & {FAILED, WAITS}:
            state.status = WAITS
        elif state.status == TO_DO and _submission(script).exists():
            state.status = FAILED


def missing_stages(states: Sequence[State]) -> list[Stage]:
    """Return the stages to submit, each after those it needs."""
    *others, board = states
    left = [s.stage for s in others if s.status in (TO_DO, FAILED, WAITS)]
    return [*left, board.stage] if left or board.status in (TO_DO, FAILED) else []


def submit_all(
    stages: Sequence[Stage], profile: Profile, state_dir: Path, jobs: Jobs, cwd: Path
) -> dict[str, str]:
    """Submit the stages; return the number of each job by the name of its stage.

    With a limit on jobs at once, every job is put into one of so many lanes and waits for the one
    before it there, however that ends. What needs the fewest others goes first, so that no lane
    waits behind a job that itself waits for another lane while there is other work.
    """
    numbers = {path: job.number for path, job in jobs.items()}
    lanes: dict[int, list[str]] = {number: [] for number in range(profile.max_jobs)}
    for path, number in sorted(numbers.items(), key=lambda item: int(item[1].split("_")[0])):
        lane = _lane_of(path) if path.parent == script_folder(state_dir) else None
        if lane in lanes:
            lanes[lane].append(number)
    submitted = {}
    for stage in sorted(stages, key=_depth):
        script = script_path(state_dir, stage)
        is_board = stage.kind == "board"
        if is_board and script in numbers:
            _call("scancel", numbers[script])  # that one does not wait for what is submitted now
        note_path(state_dir, stage).unlink(missing_ok=True)  # of a result that is gone
        lane = None if is_board else min(lanes, key=lambda it: len(lanes[it]), default=None)
        before = lanes[lane][-1] if lane is not None and lanes[lane] else ""
        clauses = dependencies(stage, state_dir, numbers, before)
        text = batch_script(stage, profile, state_dir, clauses, cwd)
        write_atomically(script, text.encode())
        write_atomically(_submission(script), str(lane).encode())
        try:
            said = _call("sbatch", "--parsable", str(script))
        except KsclError:
            _submission(script).unlink()
            raise
        numbers[script] = submitted[stage.name] = said.strip().split(";")[0]  # ;CLUSTER may follow
        if lane is not None:
            lanes[lane].append(numbers[script])
    return submitted


def _depth(stage: Stage) -> int:
    return 1 + max(map(_depth, stage.needs), default=0)


def dependencies(
    stage: Stage, state_dir: Path, numbers: Mapping[Path, str], before: str = ""
) -> list[str]:
    """Return what a job waits for: its needs and the job before it in its lane.

    The leaderboard is made however its needs end; a stage only if all of them are done.
    """
    needs = [numbers.get(script_path(state_dir, need)) for need in stage.needs]
    active = list(dict.fromkeys(number for number in needs if number))
    clauses = []
    if active:
        condition = "afterany" if stage.kind == "board" else "afterok"
        clauses.append(":".join([condition, *active]))
    if before and before not in active:
        clauses.append(f"afterany:{before}")
    return clauses


def _submission(script: Path) -> Path:
    """Return the file which says that a stage was submitted, and into which lane."""
    return script.with_suffix(".job")


def _lane_of(script: Path) -> int | None:
    try:
        return int(_submission(script).read_text())
    except (OSError, ValueError):
        return None


def cancel_all(states: Sequence[State], state_dir: Path, jobs: Jobs) -> list[str]:
    """Cancel the jobs of the suite, the leaderboard first; return the names of their stages."""
    scripts = {state.stage.name: script_path(state_dir, state.stage) for state in reversed(states)}
    scripts = {name: script for name, script in scripts.items() if script in jobs}
    for script in scripts.values():
        _submission(script).unlink(missing_ok=True)
    if scripts:
        _call("scancel", *(jobs[script].number for script in scripts.values()))
    return list(scripts)


def scripts_text(states: Sequence[State], profile: Profile, state_dir: Path, cwd: Path) -> str:
    """Return the scripts that would be submitted, with the names of stages for numbers of jobs."""
    names = {script_path(state_dir, s.stage): s.stage.name for s in states if s.status != DONE}
    parts = []
    for stage in missing_stages(states):
        clauses = dependencies(stage, state_dir, names)
        text = batch_script(stage, profile, state_dir, clauses, cwd)
        parts.append(f"# {stage.name}: {script_path(state_dir, stage)}\n{text}")
    return "\n".join(parts) or "Nothing is missing.\n"
