"""A machine that fails while a detector trains: one line that names the thing and the fix."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal

import pytest

from detection.commands.train_net import main
from tests.detection.commands.test_train_net_resume import at_iteration
from tests.helpers.detection_runs import arguments, start_train_net


def kill_a_worker() -> None:
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)


def lose_a_worker() -> None:
    at_iteration(1, kill_a_worker)


def leave_little_room() -> None:
    """Limit the size of files, which stands in for a disk that fills up."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


@pytest.mark.parametrize(
    ("accident", "workers", "named"),
    [(lose_a_worker, "1", "DATALOADER.NUM_WORKERS"), (leave_little_room, "1", "checkpoints")],
)
def test_an_accident_of_the_machine_is_one_line_that_names_the_thing_and_the_fix(
    shop, tmp_path, accident, workers, named
):
    more = ["DATALOADER.NUM_WORKERS", workers]
    done = start_train_net(shop, tmp_path / "run", *more, before=accident).wait()
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert named in line
    assert "--resume" in line
    assert "Traceback" not in done.stderr + done.stdout


def test_a_disk_without_room_for_a_checkpoint_is_told_before_training(
    shop, tmp_path, monkeypatch, capsys
):
    usage = shutil.disk_usage(tmp_path)._replace(free=12_345)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert main(arguments(shop, tmp_path / "run")) == 2
    told = capsys.readouterr()
    assert str(tmp_path / "run") in told.err
    assert "12.06 KiB" in told.err
    assert "total_loss" not in told.out
