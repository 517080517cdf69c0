"""A machine that fails while a detector trains: one line that names the thing and the fix."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal

import pytest
import torch
import yaml
from detectron2.engine import SimpleTrainer

from detection.commands.convert import main as convert
from detection.commands.train_net import main
from detection.errors import DetectionError
from detection.train.checkpoint import check_room_for
from kscl.backbone_file import Description, save_backbone
from kscl.engine.checkpoint import CHECKPOINT_FOLDER, CONTAINER_BYTES
from tests.detection.commands.test_train_net_resume import at_iteration
from tests.helpers.detection_runs import arguments, start_train_net
from tests.helpers.networks.backbones import NARROW, lively_backbone

REFERENCE = ("SOLVER.REFERENCE_WORLD_SIZE", "2", "SOLVER.IMS_PER_BATCH", "4")


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
    assert f"The disk of OUTPUT_DIR {tmp_path / 'run'} has 0.0 MiB free" in told.err
    assert "total_loss" not in told.out


def test_room_is_asked_for_all_checkpoints_less_what_is_there(tmp_path, monkeypatch):
    model = torch.nn.Linear(1000, 1000)
    detector = 4 * 1_001_000 + CONTAINER_BYTES
    checkpoint = detector + 4 * 1_001_000  # with the momentum
    usage = shutil.disk_usage(tmp_path)

    def check(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
        check_room_for(tmp_path, model)

    check(3 * checkpoint + detector)
    with pytest.raises(DetectionError, match="3 checkpoints and the trained detector take"):
        check(3 * checkpoint + detector - 1)
    (tmp_path / CHECKPOINT_FOLDER).mkdir()
    for step in (1, 2):  # as a run that is resumed has them
        name = f"checkpoint-{step:09d}-{'0' * 16}.pt"
        (tmp_path / CHECKPOINT_FOLDER / name).write_bytes(b"x" * checkpoint)
    check(checkpoint + detector)
    with pytest.raises(DetectionError, match="Make room"):
        check(checkpoint + detector - 1)


def fill_memory(*_: object) -> None:
    raise torch.cuda.OutOfMemoryError("pretended")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "divide SOLVER.IMS_PER_BATCH and SOLVER.BASE_LR by the same number"),
        (("SOLVER.IMS_PER_BATCH", "1"), "with 1 image of up to 80 pixels"),
        (("SOLVER.REFERENCE_WORLD_SIZE", "2", "SOLVER.IMS_PER_BATCH", "2"), "Use smaller images"),
        (REFERENCE, "SOLVER.REFERENCE_WORLD_SIZE 4: batch and learning rate are then divided by 2"),
    ],
)
def test_a_gpu_whose_memory_is_full_is_told_with_advice(
    shop, tmp_path, monkeypatch, capsys, words, told
):
    monkeypatch.setattr(SimpleTrainer, "run_step", fill_memory)
    assert main(arguments(shop, tmp_path / "run", *words)) == 2
    assert told in capsys.readouterr().err


def test_the_advice_for_a_full_memory_halves_the_batch_with_its_learning_rate(
    shop, tmp_path, capsys
):
    solvers = []
    for reference in ("2", "4"):
        words = (*REFERENCE, "SOLVER.REFERENCE_WORLD_SIZE", reference)
        assert main(arguments(shop, tmp_path / "run", "--print-config", *words)) == 0
        solvers.append(yaml.safe_load(capsys.readouterr().out)["SOLVER"])
    before, after = solvers
    for key, factor in (("IMS_PER_BATCH", 0.5), ("BASE_LR", 0.5), ("MAX_ITER", 2)):
        assert after[key] == before[key] * factor


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
