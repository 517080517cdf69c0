"""The batch script of one stage: run, save when time is nearly up, queue again, leave a note."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from kscl.benchmark.slurm.profile import Profile, Resources
from kscl.benchmark.suite.execute import file_name, note_path, program_path
from kscl.benchmark.suite.shell import board_command
from kscl.benchmark.suite.stages import Stage

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
    lines = [*_options(stage, profile, asked, state_dir, dependencies, cwd), ""]
    body = BODY.format(
        note=shlex.quote(str(note_path(state_dir.absolute(), stage))),
        spent=shlex.quote(str(script_path(state_dir, stage).with_suffix(".spent"))),
        retries=profile.retries,
        name=stage.name,
        skip="" if stage.kind == "board" else 'if [ -s "$note" ]; then exit 0; fi # it is done\n',
        key=stage.key,
        kind=stage.kind,
        threads=_threads(stage, asked),
        setup=f"{profile.setup.strip()}\n" if profile.setup.strip() else "",
        command=_command(stage, asked, profile.seconds_to_save),
        stop='kill -TERM "$stage"' if asked.nodes == 1 else STOP_STEP,
    )
    return "\n".join(lines) + body


def _options(
    stage: Stage,
    profile: Profile,
    asked: Resources,
    state_dir: Path,
    dependencies: Sequence[str],
    cwd: Path,
) -> list[str]:
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
    flags = ["--requeue", "--kill-on-invalid-dep=yes"]
    words = [f"--{key}={value}" for key, value in options.items() if value not in ("", 0)]
    return ["#!/bin/bash", *(f"#SBATCH {_one(word)}" for word in words + flags + [*profile.sbatch])]


def _one(word: str) -> str:
    """Return an option as sbatch reads it from a script: quoted only where it must be."""
    return f'"{word}"' if " " in word else word


def _threads(stage: Stage, asked: Resources) -> str:
    """Return the line that keeps a stage to its cores, where SLURM itself does not."""
    if not asked.cpus:
        return ""
    words = stage.arguments
    processes = int(words[words.index("--num-gpus") + 1]) if "--num-gpus" in words else 1
    each = max(1, asked.cpus * asked.nodes // processes)
    return f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{each}}}"\n'


def _command(stage: Stage, asked: Resources, seconds_to_save: int) -> str:
    words = [program_path(stage.program), *stage.arguments]
    if stage.kind == "board":
        return board_command(stage, words[0])
    if asked.nodes == 1:
        return shlex.join(words)
    place = words.index("--num-gpus")
    processes = int(words[place + 1]) // asked.nodes
    program = [words[0], *words[1:place], *words[place + 2 :]]
    # Since SLURM 22.05, srun does not take over the cores per task that its job asks for.
    cores = f"--cpus-per-task={asked.cpus} " if asked.cpus else ""
    # One agent per machine. The port differs between jobs that share a machine.
    return (
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={seconds_to_save} # not torchrun's 30 s\n"
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        f"srun --kill-on-bad-exit=1 {cores}{shlex.quote(program_path('torchrun'))} "
        f"--nnodes {asked.nodes} --nproc-per-node {processes} --rdzv-backend c10d "
        f'--rdzv-endpoint "$head:$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))" '
        '--rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" '
        f"--no-python {shlex.join(program)}"
    )
