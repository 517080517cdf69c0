"""A suite on SLURM: its scripts, and the states that notes and recorded output of squeue give.

`make test-slurm` runs the same on a real SLURM.
"""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kscl.benchmark.slurm import (
    KEYS_OF_PROFILE,
    KEYS_OF_RESOURCES,
    Job,
    Profile,
    Resources,
    batch_script,
    cancel_all,
    log_path,
    missing_stages,
    parse_jobs,
    read_profile,
    script_path,
    set_statuses,
    submit_all,
)
from kscl.benchmark.suite.execute import look, note_path
from kscl.benchmark.suite.stages import Stage
from kscl.commands.run_suite import main
from kscl.errors import KsclError
from tests.helpers.chain import smoke_suite
from tests.helpers.commands import ROOT
from tests.helpers.runs import wait_until
from tests.helpers.slurm import option, stage
from tests.slurm.__main__ import main as run_on_slurm

# As Slurm 22.05 prints it: %i|%T|%r|%o
RECORDED = """\
21|PENDING|Dependency|{two}
20|RUNNING|None|{one}
19|CANCELLED|DependencyNeverSatisfied|{two}
18|FAILED|NonZeroExitCode|{one}
17|RUNNING|None|/home/someone/else.sh
"""


def states_of(stages, state_dir, jobs):
    state_dir.mkdir(exist_ok=True)
    states = look(stages, state_dir)
    set_statuses(states, state_dir, jobs)
    return states


def test_jobs_that_have_ended_and_those_of_others_are_not_ours(stages, state_dir):
    one, two, *_ = stages
    scripts = {name: script_path(state_dir, s) for name, s in (("one", one), ("two", two))}
    jobs = parse_jobs(RECORDED.format(**scripts))
    assert jobs[scripts["one"]] == Job("20", "RUNNING", "None")
    assert jobs[scripts["two"]].number == "21"
    states = states_of(stages, state_dir, jobs)
    assert [state.status for state in states] == ["running", "queued", "to do", "to do"]


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("20|PENDING|BeginTime|{}", "queued again"),
        ("20|SUSPENDED|None|{}", "queued"),
        ("20|COMPLETING|None|{}", "running"),
        ("20|TIMEOUT|TimeLimit|{}", "failed"),
        ("20|OUT_OF_MEMORY|OutOfMemory|{}", "failed"),
        ("", "failed"),
    ],
)
def test_a_submitted_stage_without_a_note_is_what_squeue_says_or_else_failed(
    stages, state_dir, cluster, line, status
):
    submit_all(stages, Profile(), state_dir, {}, Path.cwd())
    jobs = parse_jobs(line.format(script_path(state_dir, stages[0])))
    first, second, *_ = states_of(stages, state_dir, jobs)
    assert first.status == status
    assert (second.status == "not run") == (status == "failed")


def test_the_first_call_submits_all_in_order_and_the_next_one_nothing(stages, state_dir, cluster):
    one, two, three, board = (script_path(state_dir, stage) for stage in stages)
    submitted = submit_all(stages, Profile(), state_dir, {}, Path.cwd())
    assert submitted == {"a/one": "31", "a/three": "32", "a/two": "33", "a/board": "34"}
    assert option(one, "dependency") == ""
    assert option(two, "dependency") == "afterok:31"
    assert option(board, "dependency") == "afterany:31:33:32"
    assert "#SBATCH --kill-on-invalid-dep=yes" in two.read_text().splitlines()
    recorded = "\n".join(
        f"{31 + n}|PENDING|None|{path}" for n, path in enumerate((one, two, three, board))
    )
    assert missing_stages(states_of(stages, state_dir, parse_jobs(recorded))) == []


def test_only_what_is_missing_is_submitted_again_and_the_board_waits_for_it(
    stages, state_dir, cluster, tmp_path
):
    submit_all(stages, Profile(), state_dir, {}, Path.cwd())
    one, two, three, board = stages
    Path(one.folder).mkdir()
    note = f'{{"key": "{one.key}", "kind": "pretrain", "seconds": 5.0}}'
    note_path(state_dir, one).write_text(note)
    running = parse_jobs(
        f"33|RUNNING|None|{script_path(state_dir, three)}\n"
        f"34|PENDING|Dependency|{script_path(state_dir, board)}"
    )
    states = states_of(stages, state_dir, running)
    assert [state.status for state in states] == ["done", "failed", "running", "queued"]
    left = missing_stages(states)
    assert left == [two, board]
    submitted = submit_all(left, Profile(), state_dir, running, Path.cwd())
    assert submitted == {"a/two": "35", "a/board": "36"}
    assert option(script_path(state_dir, two), "dependency") == ""
    assert option(script_path(state_dir, board), "dependency") == "afterany:35:33"
    assert (cluster / "cancelled").read_text() == "34\n"  # the board that would not wait for 35


def test_a_limit_on_jobs_at_once_makes_chains_that_outlast_a_second_call(
    tmp_path, state_dir, cluster
):
    alone = [stage(tmp_path, f"s{n}") for n in range(5)]
    board = stage(tmp_path, "board", *alone, kind="board")
    limited = Profile(max_jobs=2)
    submit_all([*alone[:4], board], limited, state_dir, {}, Path.cwd())
    scripts = [script_path(state_dir, s) for s in alone]
    waits = [option(script, "dependency") for script in scripts[:4]]
    assert waits == ["", "", "afterany:31", "afterany:32"]
    # 31 and 33, of one chain, are left: the next job goes into the other chain.
    running = parse_jobs(f"31|RUNNING|None|{scripts[0]}\n33|PENDING|Dependency|{scripts[2]}")
    submit_all([alone[4], board], limited, state_dir, running, Path.cwd())
    assert option(scripts[4], "dependency") == ""


def test_what_can_run_at_once_is_not_put_behind_what_must_wait(stages, state_dir, cluster):
    submitted = submit_all(stages, Profile(max_jobs=1), state_dir, {}, Path.cwd())
    assert list(submitted) == ["a/one", "a/three", "a/two", "a/board"]
    two = script_path(state_dir, stages[1])
    assert option(two, "dependency") == "afterok:31,afterany:32"


def test_a_job_that_sbatch_refuses_is_named_and_counts_as_not_submitted(stages, state_dir, cluster):
    (cluster / "sbatch").write_text("#!/bin/sh\necho invalid partition >&2; exit 1\n")
    with pytest.raises(KsclError, match="invalid partition"):
        submit_all(stages, Profile(), state_dir, {}, Path.cwd())
    assert {state.status for state in states_of(stages, state_dir, {})} == {"to do"}


def test_cancelling_names_the_jobs_of_this_suite_only(stages, state_dir, cluster):
    submit_all(stages, Profile(), state_dir, {}, Path.cwd())
    running = parse_jobs(
        f"31|RUNNING|None|{script_path(state_dir, stages[0])}\n99|RUNNING|None|/other.sh"
    )
    states = states_of(stages, state_dir, running)
    assert cancel_all(states, state_dir, running) == ["a/one"]
    assert (cluster / "cancelled").read_text() == "31\n"
    assert states_of(stages, state_dir, {})[0].status == "to do"


def test_all_that_is_wrong_in_a_profile_is_told_at_once(tmp_path):
    path = tmp_path / "profile.yaml"
    content = {"kinds": {"pretrian": {}, "knn": {"node": 2}}, "max_jobs": -1, "resources": []}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(KsclError) as caught:
        read_profile(path)
    for name in ("pretrian", "did you mean nodes", "max_jobs", "resources"):
        assert name in str(caught.value)


def test_the_docs_name_every_key_of_a_profile():
    text = (ROOT / "docs" / "cluster.md").read_text()
    for key in (*KEYS_OF_PROFILE, *KEYS_OF_RESOURCES):
        assert f"`{key}`" in text


def test_a_dry_run_prints_every_script_and_submits_nothing(tmp_path, cluster, capsys):
    profile = tmp_path / "profile.yaml"
    profile.write_text("resources: {partition: main}\n")
    suite = smoke_suite(tmp_path)
    assert main([str(suite), "--slurm", str(profile), "--dry-run", "--skip-check"]) == 0
    told = capsys.readouterr().out
    assert told.count("#!/bin/bash") == 10
    assert "afterok:kscl/seed0/pretrain" in told
    assert not (cluster / "n").exists()
    assert not (tmp_path / "output").exists()


def test_the_status_of_a_suite_ends_with_the_last_lines_of_what_has_failed(
    tmp_path, cluster, capsys
):
    profile = tmp_path / "profile.yaml"
    profile.write_text("resources: {partition: main}\n")
    suite = str(smoke_suite(tmp_path))
    assert main([suite, "--slurm", str(profile), "--skip-check"]) == 0
    (log,) = (option(path, "output") for path in (tmp_path / "output").rglob("shapes-*.sh"))
    Path(log).write_text("first\nslurmstepd: error: out of memory\n")
    capsys.readouterr()
    assert main([suite, "--status"]) == 1
    lines = capsys.readouterr().out.splitlines()
    rows = dict(line.split(maxsplit=1) for line in lines if line.startswith(("shapes  ", "kscl/")))
    assert rows["shapes"] == "failed"
    assert rows["kscl/seed0/pretrain"] == "not run"
    assert "slurmstepd: error: out of memory" in lines


def test_where_slurm_cannot_be_installed_its_test_says_why(monkeypatch, capsys):
    monkeypatch.setattr("tests.slurm.cluster.PROGRAMS", ("sbatch-that-nobody-has",))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert run_on_slurm() == 1
    told = capsys.readouterr().err
    assert "cannot be tested here: sbatch-that-nobody-has" in told
    assert "As root" in told


# The script of a job

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
    long = stage(tmp_path, "long", words=("bash", "-c", SAVES))
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
    long = stage(tmp_path, "long", words=("bash", "-c", SAVES))
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
    script = script_for(stage(tmp_path, "ends", words=("false",)), state_dir)
    assert run_script(script) == code
    assert (cluster / "controlled").read_text().splitlines()[-1] == asked


def test_a_job_that_is_told_to_save_before_its_stage_runs_is_queued_again(
    tmp_path, state_dir, cluster
):
    long = stage(tmp_path, "long", words=("bash", "-c", SAVES))
    profile = Profile(retries=2, setup="echo at work; sleep 2; echo loaded")
    script = script_for(long, state_dir, profile)
    assert run_script(script, signals=True) == 0
    assert "loaded" in script.with_suffix(".out").read_text()
    assert (cluster / "controlled").read_text() == "requeue 7\n"


def test_the_board_shows_what_there_is(tmp_path, state_dir):
    made, failed = stage(tmp_path, "made"), stage(tmp_path, "failed")
    Path(made.folder).mkdir()
    told = tmp_path / "told"
    command = tmp_path / "board.sh"
    command.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {told}\n')
    command.chmod(0o755)
    given = {"inputs": (made.folder, failed.folder), "words": (str(command), "--title", "a b")}
    board = stage(tmp_path, "board", made, failed, kind="board", **given)
    assert run_script(script_for(board, state_dir)) == 0
    assert told.read_text().splitlines() == [made.folder, "--title", "a b"]


def test_a_stage_on_several_machines_runs_one_torchrun_on_each(tmp_path, state_dir):
    settings = {"config": "c.yaml", "num_gpus": 16, "overrides": {"OUTPUT_DIR": "a b"}}
    train = Stage("a/train", "pretrain", "kscl.commands.pretrain", "a b", **settings)
    profile = Profile(kinds={"pretrain": Resources(nodes=2, gpus_per_node=8, cpus=64)})
    script = script_for(train, state_dir, profile)
    command = next(line for line in script.read_text().splitlines() if line.startswith("srun "))
    for text in (
        " --cpus-per-task=64 ",  # else every machine would give one core to eight processes
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d",
        '--rdzv-endpoint "$head:',
        "kscl pretrain --config-file c.yaml --auto-resume OUTPUT_DIR 'a b' &",
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
    train = stage(tmp_path, "train", num_gpus=2)
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
