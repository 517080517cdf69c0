"""A detection run that is stopped, killed or damaged ends in the same bits, or says why not."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from detection.commands.train_net import main
from kscl.backbone_file import read_plain
from kscl.engine.checkpoint import CHECKPOINT_FOLDER, find_checkpoints, save_checkpoint, step_of
from kscl.records.record import read_record
from tests.helpers.commands import ROOT
from tests.helpers.detection_runs import arguments, start_train_net
from tests.helpers.runs import same_bits, wait_until

STOP_AT = 2  # the iteration in which a signal comes


def assert_same_run(output: Path, undisturbed: Path) -> None:
    ours, theirs = (read_plain(folder / "model_final.pth") for folder in (output, undisturbed))
    assert same_bits(ours, theirs)
    records = [read_record(folder / "record.json") for folder in (output, undisturbed)]
    assert records[0]["metrics"] == records[1]["metrics"]
    with np.load(output / "detections.npz") as a, np.load(undisturbed / "detections.npz") as b:
        assert {"boxes", "scores", "category"} <= set(a.files)
        assert all(np.array_equal(a[name], b[name]) for name in a.files)


def steps_in(output: Path) -> list[int]:
    return [step_of(path) for path in find_checkpoints(output / CHECKPOINT_FOLDER)]


def at_iteration(number: int, act) -> None:
    """Act in the middle of the given iteration of this process."""
    from detectron2.engine import SimpleTrainer

    run_step = SimpleTrainer.run_step

    def act_and_run(self):
        if self.iter == number:
            act()
        run_step(self)

    SimpleTrainer.run_step = act_and_run


def signal_group(number: int) -> None:
    os.killpg(0, number)


def signal_in_training(number: int) -> None:
    at_iteration(STOP_AT, lambda: signal_group(number))


def signal_before(kind: type, method: str, number: int) -> None:
    original = getattr(kind, method)

    def signal_and_call(self):
        signal_group(number)
        original(self)

    setattr(kind, method, signal_and_call)


def signal_in_exact_statistics(number: int) -> None:
    from detectron2.engine.hooks import PreciseBN

    signal_before(PreciseBN, "update_stats", number)


def signal_in_evaluation(number: int) -> None:
    from detection.scoring.evaluator import SavedPassEvaluator

    signal_before(SavedPassEvaluator, "reset", number)


@pytest.mark.parametrize(
    ("moment", "number", "saved", "workers"),
    [
        (signal_in_training, signal.SIGTERM, STOP_AT + 1, "2"),
        (signal_in_training, signal.SIGINT, STOP_AT + 1, "0"),
        (signal_in_exact_statistics, signal.SIGTERM, 5, "0"),
        (signal_in_evaluation, signal.SIGTERM, 6, "1"),
    ],
)
def test_a_signal_to_stop_saves_within_an_iteration_and_the_run_resumes_to_the_bit(
    finished, shop, tmp_path, moment, number, saved, workers
):
    output = tmp_path / "run"
    more = ["SOLVER.CHECKPOINT_PERIOD", "99", "DATALOADER.NUM_WORKERS", workers]
    done = start_train_net(shop, output, *more, before=moment, told=[number]).wait()
    assert done.returncode == 128 + number, done.stderr
    assert steps_in(output)[0] == saved
    assert not (output / "record.json").exists()
    done = start_train_net(shop, output, "--resume", *more).wait()
    assert done.returncode == 0, done.stderr
    assert_same_run(output, finished)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(number: int) -> None:
    at_iteration(number, die)


@pytest.fixture(scope="module")
def killed(shop, tmp_path_factory) -> Path:
    """A run that was killed after its fourth iteration; tests take copies of it."""
    output = tmp_path_factory.mktemp("killed") / "run"
    done = start_train_net(shop, output, before=die_at, told=[4]).wait()
    assert done.returncode == -signal.SIGKILL
    assert steps_in(output) == [4, 3]
    return output


@pytest.fixture
def copy(killed, tmp_path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "run"))


def newest_of(output: Path) -> Path:
    return find_checkpoints(output / CHECKPOINT_FOLDER)[0]


def flip_bytes(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for index in range(41):
        content[(index + 1) * len(content) // 50] ^= 0x10
    path.write_bytes(content)


def drop_a_tensor(path: Path) -> None:
    content = read_plain(path)
    content["model"].popitem()
    torch.save(content, path)


@pytest.mark.parametrize("damage", [flip_bytes, drop_a_tensor])
def test_a_damaged_checkpoint_is_passed_over_and_the_run_ends_in_the_same_bits(
    finished, shop, copy, damage
):
    newest = newest_of(copy)
    damage(newest)
    done = start_train_net(shop, copy, "--resume").wait()
    assert done.returncode == 0, done.stderr
    assert newest.name in done.stderr + done.stdout
    assert_same_run(copy, finished)


class RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_is_resumed_from_a_pickle_that_last_checkpoint_names(
    finished, shop, copy, tmp_path
):
    for folder in (copy, copy / CHECKPOINT_FOLDER):
        (folder / "evil.pkl").write_bytes(pickle.dumps({"model": RunsCode(tmp_path / "ran")}))
        (folder / "last_checkpoint").write_text("evil.pkl")
    done = start_train_net(shop, copy, "--resume").wait()
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
    assert_same_run(copy, finished)


def rewrite(output: Path, **changes: object) -> Path:
    """Replace the checkpoints by one with other content and a fitting checksum."""
    folder = output / CHECKPOINT_FOLDER
    content = {**read_plain(newest_of(output)), **changes}
    for path in find_checkpoints(folder):
        path.unlink()
    return save_checkpoint(folder, 4, content, 1)


def test_a_checkpoint_that_does_not_fit_the_model_is_refused_by_name(shop, copy, capsys):
    tensors = read_plain(newest_of(copy))["model"]
    name, _ = tensors.popitem()
    path = rewrite(copy, model=tensors)
    assert main(arguments(shop, copy, "--resume")) == 2
    told = capsys.readouterr().err
    assert str(path) in told
    assert name in told
    assert not (copy / "record.json").exists()


def test_checkpoints_are_taken_only_from_the_runs_own_folder(shop, copy, tmp_path, capsys):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in find_checkpoints(copy / CHECKPOINT_FOLDER):
        shutil.move(path, elsewhere / path.name)
        path.symlink_to(elsewhere / path.name)
    assert main(arguments(shop, copy, "--resume")) == 2
    assert "no checkpoint" in capsys.readouterr().err


def test_another_number_of_processes_is_refused_unless_it_is_asked_for_by_name(shop, copy, capsys):
    rewrite(copy, world_size=2, world_sizes=[[0, 2]])
    assert main(arguments(shop, copy, "--resume")) == 2
    told = capsys.readouterr().err
    assert "world_size: 2 before, 1 now" in told
    assert "--allow-world-size-change" in told
    assert "each process groups its own images" in told
    done = start_train_net(shop, copy, "--resume", "--allow-world-size-change").wait()
    assert done.returncode == 0, done.stderr
    assert "until step 4 there were 2. The size of the batch stays the same" in done.stderr
    assert "its views stay the same" not in done.stdout + done.stderr
    record = read_record(copy / "record.json")
    assert record["details"]["world_sizes"] == [[0, 2], [4, 1]]
    assert record["protocol"]["definition"]["processes"] == [2, 1]


def on_two_ranks(shop: Path, output: Path, *more: str) -> subprocess.Popen[str]:
    """The tool as a user starts it, long enough to be stopped on the way."""
    long = ["SOLVER.MAX_ITER", "40", "SOLVER.STEPS", "(30,)", "MODEL.RESNETS.NORM", "naiveSyncBN"]
    words = arguments(shop, output, "--num-gpus=2", *more, *long)
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools" / "train_net.py"), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_two_ranks_that_are_stopped_resume_to_the_bit_and_on_no_other_number(shop, tmp_path):
    undisturbed, output = tmp_path / "undisturbed", tmp_path / "run"
    first = on_two_ranks(shop, undisturbed)
    told = first.communicate()[1]
    assert first.returncode == 0, told
    stopped = on_two_ranks(shop, output)
    wait_until(lambda: bool(steps_in(output)) or stopped.poll() is not None, 200)
    stopped.terminate()
    told = stopped.communicate()[1]
    assert stopped.returncode == 128 + signal.SIGTERM, told
    assert 0 < steps_in(output)[0] < 40
    alone = on_two_ranks(shop, output, "--resume", "--num-gpus=1")
    told = alone.communicate()[1]
    assert alone.returncode == 2
    assert "world_size: 2 before, 1 now" in told
    resumed = on_two_ranks(shop, output, "--resume")
    told = resumed.communicate()[1]
    assert resumed.returncode == 0, told
    assert_same_run(output, undisturbed)
    assert read_record(output / "record.json")["details"]["world_sizes"] == [[0, 2]]


def wait_at(number: int, gate: Path) -> None:
    def wait() -> None:
        gate.with_suffix(".reached").touch()
        while not gate.exists():
            time.sleep(0.01)

    at_iteration(number, wait)


def be_impatient() -> None:
    import kscl.runtime.folder_lock

    kscl.runtime.folder_lock.LOCK_PATIENCE = 0.2


def test_of_two_runs_into_one_folder_the_second_is_refused(finished, shop, tmp_path):
    output, gate = tmp_path / "run", tmp_path / "gate"
    first = start_train_net(shop, output, "--auto-resume", before=wait_at, told=[3, gate])
    wait_until(lambda: gate.with_suffix(".reached").exists() or first.returncode is not None, 200)
    inner = tmp_path / "second"
    inner.mkdir()
    (inner / "run").symlink_to(output)
    second = start_train_net(shop, inner / "run", "--auto-resume", before=be_impatient).wait()
    gate.touch()
    first.wait()
    assert second.returncode == 2
    assert "Another run is writing to" in second.stderr
    assert first.returncode == 0, first.stderr
    assert_same_run(output, finished)
