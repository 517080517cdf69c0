"""A machine that fails while a detector trains: one line that names the thing and the fix."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal

import pytest
import torch

from detection.commands.convert import main as convert
from detection.commands.train_net import main
from kscl.backbone_file import Description, save_backbone
from tests.detection.commands.test_train_net_resume import at_iteration
from tests.helpers.detection_runs import arguments, start_train_net
from tests.helpers.networks.backbones import NARROW, lively_backbone


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


def error_of(done) -> str:
    """The one error of a run that ended by it, as it is told to the user."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1
    return done.stderr.partition("error: ")[2]


def break_file(path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def break_at_iteration(path) -> None:
    at_iteration(2, lambda: break_file(path))


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_test_image_that_breaks_during_training_is_named_and_the_training_kept(
    shop, tmp_path, workers
):
    shutil.copytree(shop, tmp_path / "shop")
    picture = tmp_path / "shop/voc/JPEGImages/012.jpg"
    content, more = picture.read_bytes(), ["DATALOADER.NUM_WORKERS", workers]
    words = tmp_path / "shop", tmp_path / "run"
    broken = start_train_net(*words, *more, before=break_at_iteration, told=[picture]).wait()
    told = error_of(broken)
    assert str(picture) in told
    assert "truncated" in told
    assert "put it back and continue with --resume" in told
    picture.write_bytes(content)
    done = start_train_net(*words, "--resume", *more).wait()
    assert done.returncode == 0, done.stderr
    assert "Training starts at iteration 6 of 6" in done.stdout


def convert_with_constant_channels(shop, folder) -> None:
    """Convert a network of which many channels are the same at every pixel of every image."""
    state = lively_backbone("resnet50", NARROW).state_dict()
    state["bn1.weight"][::2], state["bn1.bias"][::2] = 0, 1000  # what the pixels do not reach
    for layer in ("conv1", "downsample.0"):  # all outputs but one see nothing else
        state[f"layer1.0.{layer}.weight"][1:, 1::2] = 0
    save_backbone(folder / "x.safetensors", state, Description("resnet50", NARROW))
    words = [str(folder / "x.safetensors"), "--protocol", "detection/shapes_tiny_retinanet.yaml"]
    assert convert([*words, "--output-dir", str(shop / "weights-constant")]) == 0


@pytest.mark.slow
def test_a_naive_norm_that_computes_no_number_is_named(shop, tmp_path):
    """Detectron2's own variance is negative there: on two processes, not on one."""
    convert_with_constant_channels(shop, tmp_path)
    more = ["MODEL.RESNETS.NORM", "naiveSyncBN", "MODEL.RETINANET.NUM_CLASSES", "2"]
    more += ["INPUT.MIN_SIZE_TRAIN", "(128,)", "INPUT.MIN_SIZE_TEST", "128", "SOLVER.MAX_ITER", "2"]
    more += ["SOLVER.STEPS", "(1,)", "TEST.PRECISE_BN.ENABLED", "False"]
    alone = start_train_net(shop, tmp_path / "one", *more, weights="-constant").wait()
    assert alone.returncode == 0, alone.stderr
    several = start_train_net(
        shop, tmp_path / "two", "--num-gpus=2", *more, weights="-constant"
    ).wait()
    told = error_of(several)
    assert "MODEL.RESNETS.NORM is naiveSyncBN" in told
    assert "INPUT.MIN_SIZE_TRAIN" in told
    assert not (tmp_path / "two" / "record.json").exists()


def spoil_statistics(name: str, value: float) -> None:
    """Let the exact statistics of the norms end in a value that no norm can use."""
    from detectron2.engine.hooks import PreciseBN

    update_stats = PreciseBN.update_stats

    def update_and_spoil(self):
        update_stats(self)
        getattr(self._model.backbone.res3[0].conv1.norm, name)[0] = value

    PreciseBN.update_stats = update_and_spoil


@pytest.mark.parametrize(
    ("name", "value"),
    [("running_var", -0.1), ("running_var", torch.nan), ("running_mean", torch.inf)],
)
def test_a_detector_that_would_find_nothing_in_silence_is_not_scored(shop, tmp_path, name, value):
    output = tmp_path / "run"
    done = start_train_net(shop, output, before=spoil_statistics, told=[name, value]).wait()
    told = error_of(done)
    assert "backbone.res3.0.conv1.norm has" in told
    assert "TEST.PRECISE_BN" in told
    assert not (output / "model_final.pth").exists()
    assert not (output / "record.json").exists()
