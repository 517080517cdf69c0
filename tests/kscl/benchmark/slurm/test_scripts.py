"""The script of a job: what it asks for, and what it does when it succeeds or nears its limit."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from kscl.benchmark.slurm.profile import (
    Profile,
    Resources,
    read_profile,
)
from kscl.benchmark.slurm.script import batch_script, log_path, script_path
from kscl.benchmark.suite.execute import look, note_path
from kscl.benchmark.suite.stages import Stage
from kscl.errors import KsclError
from tests.helpers.runs import wait_until
from tests.helpers.slurm import option, stage

NO_LIMITS = Profile()


def run_script(script: Path, signals: bool = False, restarts: int = 0, **more: str) -> int:
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts), **more}
    log = script.with_suffix(".out")
    with log.open("w") as output:
        process = subprocess.Popen(["bash", script], env=environment, stdout=output, stderr=output)
    if signals:
        wait_until(lambda: "at work" in log.read_text())
        process.send_signal(signal.SIGUSR1)
    return process.wait(30)


def script_for(stage: Stage, state_dir: Path, profile: Profile = NO_LIMITS) -> Path:
    path = script_path(state_dir, stage)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(batch_script(stage, profile, state_dir, [], Path.cwd()))
    return path


def test_a_job_that_succeeds_leaves_the_note_and_is_not_run_twice(stages, state_dir):
    script = script_for(stages[0], state_dir)
    assert run_script(script) == 0
    (state,) = look(stages[:1], state_dir)
    assert state.status == "done"
    before = note_path(state_dir, stages[0]).stat().st_mtime_ns
    assert run_script(script) == 0
    assert note_path(state_dir, stages[0]).stat().st_mtime_ns == before


SAVES = "trap 'echo saved; exit 143' TERM; echo at work; while :; do sleep 0.1; done"


def test_a_job_near_its_time_limit_saves_and_is_queued_again_until_its_retries_are_used(
    tmp_path, state_dir, cluster
):
    long = stage(tmp_path, "long", program="bash", arguments=("-c", SAVES))
    script = script_for(long, state_dir, Profile(retries=2))
    assert run_script(script, signals=True) == 0
    assert "saved" in script.with_suffix(".out").read_text()
    assert (cluster / "controlled").read_text() == "requeue 7\n"
    assert not note_path(state_dir, long).exists()
    assert run_script(script, signals=True, restarts=2) == 1
    told = script.with_suffix(".out").read_text()
    assert "a/long" in told.splitlines()[-1]
    assert "2 retries" in told
    assert (cluster / "controlled").read_text() == "requeue 7\n"
    assert run_script(script, restarts=3) == 1  # queued again by SLURM itself, once too often


def test_a_task_of_an_array_is_queued_again_as_that_task(tmp_path, state_dir, cluster):
    long = stage(tmp_path, "long", program="bash", arguments=("-c", SAVES))
    script = script_for(long, state_dir)
    task = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    assert run_script(script, signals=True, **task) == 0
    assert (cluster / "controlled").read_text() == "requeue 5_2\n"


@pytest.mark.parametrize(
    ("preempted", "code", "asked"),
    [("2026-11-17T04:55:06", 0, "requeue 7"), ("None", 1, "show job 7")],
)
def test_a_stage_that_preemption_ends_is_queued_again_and_one_that_fails_is_not(
    tmp_path, state_dir, cluster, preempted, code, asked
):
    with (cluster / "scontrol").open("a") as file:
        file.write(f"echo '   PreemptEligibleTime=2026-11-17T04:55:01 PreemptTime={preempted}'\n")
    script = script_for(stage(tmp_path, "ends", program="false", arguments=()), state_dir)
    assert run_script(script) == code
    assert (cluster / "controlled").read_text().splitlines()[-1] == asked


def test_a_job_that_is_told_to_save_before_its_stage_runs_is_queued_again(
    tmp_path, state_dir, cluster
):
    long = stage(tmp_path, "long", program="bash", arguments=("-c", SAVES))
    profile = Profile(retries=2, setup="echo at work; sleep 2; echo loaded")
    script = script_for(long, state_dir, profile)
    assert run_script(script, signals=True) == 0
    assert "loaded" in script.with_suffix(".out").read_text()
    assert (cluster / "controlled").read_text() == "requeue 7\n"


def test_the_board_shows_what_there_is(tmp_path, state_dir):
    made, failed = stage(tmp_path, "made"), stage(tmp_path, "failed")
    Path(made.folder).mkdir()
    told = tmp_path / "told"
    words = (made.folder, failed.folder, "--title", "a b")
    command = tmp_path / "board.sh"
    command.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {told}\n')
    command.chmod(0o755)
    board = stage(tmp_path, "board", made, failed, kind="board")
    board = replace(board, program=str(command), arguments=words)
    assert run_script(script_for(board, state_dir)) == 0
    assert told.read_text().splitlines() == [made.folder, "--title", "a b"]


def test_a_stage_on_several_machines_runs_one_torchrun_on_each(tmp_path, state_dir):
    words = ("--config-file", "c.yaml", "--num-gpus", "16", "OUTPUT_DIR", "a b")
    train = stage(tmp_path, "train", program="kscl-pretrain", arguments=words)
    profile = Profile(kinds={"pretrain": Resources(nodes=2, gpus_per_node=8, cpus=64)})
    script = script_for(train, state_dir, profile)
    command = next(line for line in script.read_text().splitlines() if line.startswith("srun "))
    for text in (
        " --cpus-per-task=64 ",  # else every machine would give one core to eight processes
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d",
        '--rdzv-endpoint "$head:',
        "kscl-pretrain --config-file c.yaml OUTPUT_DIR 'a b' &",
    ):
        assert text in command
    assert "--num-gpus" not in command
    assert 'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"' in script.read_text()  # 128 for 16
    # srun would kill the stage if it were sent SIGTERM; torchrun would do so after 30 s.
    assert "then scancel --signal=TERM " in script.read_text()
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120" in script.read_text()
    assert option(script, "nodes") == "2"
    assert option(script, "gpus-per-node") == "8"
    for asked in (Resources(nodes=3), Resources(gpus_per_node=8), Resources(gres="gpu:8")):
        with pytest.raises(KsclError, match="a/train has 16 processes"):
            script_for(train, state_dir, Profile(kinds={"pretrain": asked}))


@pytest.mark.parametrize(
    ("asked", "name", "value"),
    [
        (Resources(gpus_per_node=8), "gpus-per-node", "2"),
        (Resources(gres="gpu:a100:8"), "gres", "gpu:a100:2"),
        (Resources(), "gpus-per-node", ""),
    ],
)
def test_a_stage_asks_for_one_gpu_per_process(tmp_path, state_dir, asked, name, value):
    train = stage(tmp_path, "train", program="kscl-pretrain", arguments=("--num-gpus", "2"))
    profile = Profile(kinds={"pretrain": asked})
    assert option(script_for(train, state_dir, profile), name) == value


def test_resources_follow_the_kind_of_a_stage_and_the_shipped_profile_is_valid(
    tmp_path, state_dir, stages
):
    profile = read_profile("slurm/example.yaml")
    assert profile.kinds["pretrain"].gpus_per_node == 8
    assert {profile.kinds[k].gpus_per_node for k in ("convert", "board", "shapes", "basis")} == {0}
    script = script_for(replace(stages[0], kind="convert"), state_dir, profile)
    assert "gpu" not in option(script, "gres") + option(script, "gpus-per-node")
    assert option(script, "partition") == "gpu"
    assert option(script, "signal") == "B:USR1@120"
    assert option(script, "output") == str(log_path(state_dir, replace(stages[0], kind="convert")))
    assert {"#SBATCH --requeue", "#SBATCH --open-mode=append"} <= set(
        script.read_text().splitlines()
    )
