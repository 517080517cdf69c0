"""A run that is killed at any moment ends in the same bits as one that was not."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kscl.engine.metrics_log import METRICS_FILE
from kscl.run.checkpoint import CHECKPOINT_FOLDER, UNFINISHED, find_checkpoints
from kscl.runtime.logs import LOG_FILE
from tests.helpers.commands import ROOT
from tests.helpers.runs import (
    Run,
    end_all,
    is_finished,
    same_bits,
    wait_until,
)

pytestmark = pytest.mark.full

EXACT = ("learner", "optimizer", "scaler", "step", "window", "data", "bad_images")
OF_THE_CLOCK = ("time", "images_per_second", "views_per_second", "fraction_waiting_for_data")
LONGEST_WAIT = 0.3  # seconds, about a tenth of what a run takes

# Between them: every kind of state that a run can have.
SETTINGS: dict[str, list[object]] = {
    "queue, SGD": ["SOLVER.MAX_STEPS", 17],  # within an epoch
    "memory bank, AdamW": [
        *("DICTIONARY.TYPE", "memory_bank", "SOLVER.OPTIMIZER", "adamw"),
        *("INPUT.SIZE", "[[0, 24], [1, 32]]"),
    ],
    "two ranks, averaged statistics": [
        *("KEY_ENCODER.BATCH_NORM", "eval", "METHOD.NUM_QUERIES", 2, "SOLVER.GRAD_ACCUM_STEPS", 2),
        *("VIEWS.SMALL.COUNT", 2, "VIEWS.SMALL.SIZE", 16, "AUGMENT_KEYS", "moco_v1"),
    ],
    "two ranks, remembered keys": [
        *("METHOD.NUM_SHOTS", 1, "METHOD.REMEMBER", 2, "METHOD.REMEMBER_DECAY", 0.5),
        *("SOLVER.GRAD_ACCUM_STEPS", 2),
    ],
    "BYOL": ["METHOD.NAME", "byol", "METHOD.PREDICTOR_DIM", 32, "PROJECTOR.TYPE", "mlp_bn"],
    "two ranks, VICReg": ["METHOD.NAME", "vicreg", "PROJECTOR.TYPE", "mlp3_bn"],
    # Sums of three depend on their order, so the buckets of gradients must be the same ones too.
    "three ranks": ["SOLVER.BATCH_SIZE", 24],
}
TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]


def ranks_of(setting):
    return {"two": 2, "three": 3}.get(setting.split()[0], 1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, images):
    """A run with these settings that nobody disturbed."""

    @functools.cache
    def finished(setting):
        folder = tmp_path_factory.mktemp("undisturbed") / "run"
        run = Run(folder, images, *SETTINGS[setting], ranks=ranks_of(setting))
        run.finish()
        return run

    return finished


def assert_same_run(run, undisturbed):
    final, expected = run.state(), undisturbed.state()
    for part in EXACT:
        assert same_bits(final[part], expected[part]), f"{part} differs"
    assert logged(run) == logged(undisturbed)  # to the last bit
    assert (run.folder / "record.json").exists()
    assert not list((run.folder / CHECKPOINT_FOLDER).glob(UNFINISHED))


def logged(run):
    """The rows of the log without what the clock decides."""
    rows = [json.loads(line) for line in (run.folder / METRICS_FILE).open()]
    return [{name: row[name] for name in row if name not in OF_THE_CLOCK} for row in rows]


def times_resumed(run):
    return (run.folder / LOG_FILE).read_text().count("Resuming after step")


def kill_until_done(run, chance, kills, worker_counts):
    """Start, kill at a random moment, resume, …, let it end; returns how often it was killed."""
    killed = 0
    while killed < kills and not (run.folder / "record.json").exists():
        workers = chance.choice(worker_counts)
        processes = run.start("--auto-resume", more=["DATA.NUM_WORKERS", workers])
        wait_for_progress(run, processes, checkpoints=chance.choice((0, 1, 1, 2)))
        time.sleep(chance.uniform(0, LONGEST_WAIT))
        for process in chance.sample(processes, len(processes)):
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            time.sleep(chance.choice((0, 0.02)))
        end_all(processes)
        killed += any(process.exitcode == -signal.SIGKILL for process in processes)
    run.finish("--auto-resume")
    return killed


def wait_for_progress(run, processes, checkpoints):
    """Seconds alone would, on a busy machine, only ever kill runs that have not begun."""
    for _ in range(checkpoints):
        before = find_checkpoints(run.folder / CHECKPOINT_FOLDER)[:1]
        wait_until(
            lambda before=before: (
                find_checkpoints(run.folder / CHECKPOINT_FOLDER)[:1] != before
                or is_finished(processes)
            ),
            300,
        )


def kill_runs(tmp_path, images, setting, expected, kills, worker_counts):
    chance = random.Random(f"{setting} {kills}")
    killed = resumed = attempt = 0
    while killed < kills:
        attempt += 1
        run = Run(tmp_path / f"run{attempt}", images, *SETTINGS[setting], ranks=ranks_of(setting))
        killed += kill_until_done(run, chance, kills - killed, worker_counts)
        assert_same_run(run, expected)
        resumed += times_resumed(run)
    assert resumed, "no kill came late enough to leave a checkpoint"


@pytest.mark.parametrize(
    ("setting", "kills", "worker_counts"),
    [
        ("queue, SGD", 4, (0,)),
        ("memory bank, AdamW", 3, (0, 1, 2)),
        ("two ranks, averaged statistics", 4, (0,)),
        ("two ranks, remembered keys", 2, (0,)),
        ("BYOL", 2, (0,)),
        ("two ranks, VICReg", 2, (0,)),
    ],
)
def test_a_run_killed_at_random_moments_ends_in_the_same_bits(
    tmp_path, images, undisturbed, setting, kills, worker_counts
):
    kill_runs(tmp_path, images, setting, undisturbed(setting), kills, worker_counts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "kills"), list(zip(SETTINGS, (10, 10, 10, 8, 4, 3, 5), strict=True))
)
def test_fifty_kills_do_not_change_a_bit(tmp_path, images, undisturbed, setting, kills):
    kill_runs(tmp_path, images, setting, undisturbed(setting), kills, (0, 0, 1, 2))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_middle_of_the_file():
    import kscl.run.checkpoint

    write = kscl.run.checkpoint._Hashing.write

    def write_and_die(self, data):
        written = write(self, data)
        if "000000006" in self.file.name and self.file.tell() > 100_000:
            self.file.flush()
            die()
        return written

    kscl.run.checkpoint._Hashing.write = write_and_die


def die_before_it_has_its_name():
    rename = Path.rename
    Path.rename = lambda self, to: die() if "000000006" in self.name else rename(self, to)


def die_before_older_ones_are_removed():
    unlink = Path.unlink

    def unlink_or_die(self, missing_ok=False):
        if self.name.startswith("checkpoint-000000002"):
            die()
        unlink(self, missing_ok)

    Path.unlink = unlink_or_die


@pytest.mark.parametrize(
    ("moment", "newest", "unfinished"),
    [
        (die_in_the_middle_of_the_file, 4, 1),
        (die_before_it_has_its_name, 4, 1),
        (die_before_older_ones_are_removed, 6, 0),
    ],
)
def test_a_kill_while_a_checkpoint_is_written_loses_nothing(
    tmp_path, images, undisturbed, moment, newest, unfinished
):
    run = Run(tmp_path / "run", images, *SETTINGS["queue, SGD"])
    (process,) = run.start(before=moment)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    folder = run.folder / CHECKPOINT_FOLDER
    assert run.state()["step"] == newest
    assert len(list(folder.glob(UNFINISHED))) == unfinished
    run.finish("--resume")
    assert len(find_checkpoints(folder)) == 2
    assert_same_run(run, undisturbed("queue, SGD"))


def test_a_damaged_newest_checkpoint_is_passed_over_and_the_run_ends_the_same(
    tmp_path, images, undisturbed
):
    run = Run(tmp_path / "run", images, *SETTINGS["queue, SGD"])
    (process,) = run.start(before=die_before_older_ones_are_removed)
    process.join(120)
    newest = find_checkpoints(run.folder / CHECKPOINT_FOLDER)[0]
    newest.write_bytes(newest.read_bytes()[:-1])
    run.finish("--resume")
    assert newest.name in run.log.read_text()
    assert_same_run(run, undisturbed("queue, SGD"))


@pytest.mark.parametrize(
    ("setting", "number"),
    [("queue, SGD", signal.SIGINT), ("two ranks, averaged statistics", signal.SIGTERM)],
)
def test_a_signal_to_stop_saves_the_step_and_ends_cleanly_on_all_ranks(
    tmp_path, images, undisturbed, setting, number
):
    run = Run(tmp_path / "run", images, *SETTINGS[setting], ranks=ranks_of(setting))
    only_at_the_end = ["CHECKPOINT.PERIOD_STEPS", 0, "CHECKPOINT.PERIOD_EPOCHS", 99]
    processes = run.start(more=only_at_the_end)
    wait_until(lambda: (run.folder / METRICS_FILE).exists())
    os.kill(processes[-1].pid, number)  # one rank hears of it, all stop
    for process in processes:
        process.join(60)
    assert {process.exitcode for process in processes} <= {128 + number, 128 + signal.SIGTERM}
    assert 1 <= run.state()["step"] < undisturbed(setting).state()["step"]
    assert "--resume continues" in run.log.read_text()
    run.finish("--resume")
    assert_same_run(run, undisturbed(setting))


def launch(run, *flags):
    """The tool as a user starts it, with a launcher and two ranks."""
    command = [sys.executable, "-W", "ignore", ROOT / "tools" / "pretrain.py", "--num-gpus", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with run.log.open("a") as log:
        return subprocess.Popen(
            [*map(str, command), *run.command(*flags)], stderr=log, cwd=ROOT, env=environment
        )


def test_ranks_end_with_their_launcher_and_hear_signals_through_it(tmp_path, images, undisturbed):
    setting = "two ranks, averaged statistics"
    run = Run(tmp_path / "run", images, *SETTINGS[setting], ranks=2)
    folder = run.folder / CHECKPOINT_FOLDER
    launcher = launch(run)
    wait_until(lambda: bool(find_checkpoints(folder)), 120)
    launcher.kill()
    launcher.wait()
    launcher = launch(run, "--resume")  # gets the folder only when the old ranks are gone
    wait_until(lambda: times_resumed(run) == 1, 120)
    launcher.terminate()
    assert launcher.wait(60) == 128 + signal.SIGTERM, run.log.read_text()[-1500:]
    run.finish("--resume")
    assert_same_run(run, undisturbed(setting))


def test_a_restart_by_torchrun_goes_on(tmp_path, images, undisturbed):
    setting = "two ranks, averaged statistics"
    run = Run(tmp_path / "run", images, *SETTINGS[setting])
    script = tmp_path / "dies_once.py"
    script.write_text(
        "import os, sys\n"
        "from kscl.commands.pretrain import main\n"
        "from tests.kscl.engine.test_resume import die_before_older_ones_are_removed\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    die_before_older_ones_are_removed()\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    torchrun = [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*torchrun, *run.command("--auto-resume")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert times_resumed(run) == 1
    assert_same_run(run, undisturbed(setting))
