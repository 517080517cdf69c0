"""What would stop a fine-tuning is found before it starts; what stops it later is one line."""

from __future__ import annotations

import json
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
from detection.config import load_detection_config, set_network
from detection.convert.routes import choose_route
from detection.train.detector import build_on_meta, check_room_for, export_detector
from kscl.backbone_file import Description, save_backbone
from kscl.config import shipped_configs
from kscl.errors import KsclError
from kscl.methods.encoder import build_backbone
from kscl.run.checkpoint import CHECKPOINT_FOLDER, CONTAINER_BYTES
from tests.detection.commands.test_train_net_resume import at_iteration
from tests.helpers.detection_runs import arguments, start_train_net
from tests.helpers.networks.backbones import NARROW, lively_backbone
from tests.helpers.networks.small import NETWORKS

pytestmark = pytest.mark.full

REFERENCE = ("SOLVER.REFERENCE_WORLD_SIZE", "2", "SOLVER.IMS_PER_BATCH", "4")
PROTOCOLS = sorted(path.stem for path in (shipped_configs() / "detection").glob("[!_]*.yaml"))
SCRATCH = ("MODEL.WEIGHTS", "", "KSCL.FROM_SCRATCH", "True")
FPN = (
    *("MODEL.BACKBONE.NAME", "build_timm_fpn_backbone", "MODEL.FPN.OUT_CHANNELS", "8"),
    *("MODEL.RESNETS.OUT_FEATURES", "['res2', 'res3', 'res4', 'res5']"),
    *("MODEL.FPN.IN_FEATURES", "['res2', 'res3', 'res4', 'res5']"),
)


def kill_a_worker() -> None:
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)


def lose_a_worker() -> None:
    at_iteration(1, kill_a_worker)


def leave_little_room() -> None:
    """Limit the size of files, which stands in for a disk that fills up."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


@pytest.mark.parametrize(
    ("accident", "named"),
    [(lose_a_worker, "DATALOADER.NUM_WORKERS"), (leave_little_room, "checkpoints")],
)
def test_an_accident_of_the_machine_is_one_line_that_names_the_thing_and_the_fix(
    shop, tmp_path, accident, named
):
    more = ["DATALOADER.NUM_WORKERS", "1"]
    done = start_train_net(shop, tmp_path / "run", *more, before=accident).wait()
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert named in line
    assert "--resume" in line
    assert "Traceback" not in done.stderr + done.stdout


def test_room_is_asked_for_all_checkpoints_less_what_is_there(tmp_path, monkeypatch):
    model = torch.nn.Linear(1000, 1000)
    detector = 4 * 1_001_000 + CONTAINER_BYTES
    checkpoint = detector + 4 * 1_001_000  # with the momentum
    usage = shutil.disk_usage(tmp_path)

    def check(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
        check_room_for(load_detection_config(None, ["OUTPUT_DIR", str(tmp_path)]), model)

    check(3 * checkpoint + detector)
    with pytest.raises(KsclError, match="3 checkpoints and the trained detector need"):
        check(3 * checkpoint + detector - 1)
    (tmp_path / CHECKPOINT_FOLDER).mkdir()
    for step in (1, 2):  # as a run that is resumed has them
        name = f"checkpoint-{step:09d}-{'0' * 16}.pt"
        (tmp_path / CHECKPOINT_FOLDER / name).write_bytes(b"x" * checkpoint)
    check(checkpoint + detector)
    with pytest.raises(KsclError, match="Make room"):
        check(checkpoint + detector - 1)


def fill_memory(*_: object) -> None:
    raise torch.cuda.OutOfMemoryError("pretended")


@pytest.mark.parametrize(
    ("words", "told"),
    [
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


def test_a_test_image_that_breaks_during_training_is_named_and_the_training_kept(shop, tmp_path):
    shutil.copytree(shop / "voc", tmp_path / "shop/voc")
    shutil.copytree(shop / "weights0", tmp_path / "shop/weights0")
    picture = tmp_path / "shop/voc/JPEGImages/012.jpg"
    content, more = picture.read_bytes(), ["DATALOADER.NUM_WORKERS", "1"]
    words = tmp_path / "shop", tmp_path / "run"
    broken = start_train_net(*words, *more, before=break_at_iteration, told=[picture]).wait()
    told = error_of(broken)
    assert str(picture) in told
    assert "truncated" in told
    assert "continue with --resume" in told
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


@pytest.mark.parametrize(
    ("name", "value"),
    [("running_var", -0.1), ("running_var", torch.nan), ("running_mean", torch.inf)],
)
def test_a_detector_that_would_find_nothing_in_silence_is_not_written(tmp_path, name, value):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4))
    export_detector(tmp_path, model)
    (tmp_path / "model_final.pth").unlink()
    getattr(model[1], name)[0] = value
    with pytest.raises(KsclError, match=r"mean or variance of 1 .*TEST\.PRECISE_BN"):
        export_detector(tmp_path, model)
    assert not (tmp_path / "model_final.pth").exists()


def problems_of(capsys, words: list[str]) -> list[dict]:
    """Run the check; return what it calls fatal."""
    code = main(words)
    report = json.loads(capsys.readouterr().out)
    fatal = [problem for problem in report["problems"] if problem["fatal"]]
    assert code == (1 if fatal else 0)
    return fatal


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((*FPN, "KSCL.TIMM.NAME", "convit_tiny"), "convit_tiny has no feature_info"),
        (FPN, "KSCL.TIMM.NAME is empty"),
        (("MODEL.ROI_HEADS.NAME", "NoSuchHeads"), "NoSuchHeads"),
    ],
)
def test_a_detector_that_cannot_be_built_is_told_before_it_has_a_folder(
    shop, tmp_path, capsys, words, told
):
    words = (*SCRATCH, *words)
    (problem,) = problems_of(capsys, arguments(shop, tmp_path / "run", "--check", *words))
    assert told in problem["what"]
    assert main(arguments(shop, tmp_path / "run", *words)) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_disk_without_room_for_a_checkpoint_is_told_by_the_check_and_before_training(
    shop, tmp_path, capsys, monkeypatch
):
    words = arguments(shop, tmp_path / "not" / "made", "--check")
    assert problems_of(capsys, words) == []
    usage = shutil.disk_usage(tmp_path)._replace(free=12_345)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    (problem,) = problems_of(capsys, words)
    assert problem["where"] == "OUTPUT_DIR"
    assert f"The disk of OUTPUT_DIR {tmp_path / 'not' / 'made'} has 0.0 MiB" in problem["what"]
    assert not (tmp_path / "not").exists()
    assert main(arguments(shop, tmp_path / "not" / "made")) == 2
    told = capsys.readouterr()
    assert problem["what"] in told.err
    assert "total_loss" not in told.out


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_shipped_detector_is_checked_without_memory_or_random_numbers(protocol):
    before = torch.random.get_rng_state()
    model = build_on_meta(load_detection_config(f"detection/{protocol}.yaml"))
    assert {value.device.type for value in model.state_dict().values()} == {"meta"}
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", ["convnext_atto", "resnetblur50", "vit_tiny_patch16_224"])
def test_networks_of_timms_are_checked_so_with_frozen_stages_and_other_norms(name):
    cfg = load_detection_config("detection/shapes_tiny_fpn.yaml")
    network = build_backbone(name, NETWORKS[name])
    set_network(cfg, choose_route(network, name, NETWORKS[name], cfg, "timm").keys)
    cfg.MODEL.BACKBONE.FREEZE_AT = 0 if name.startswith("vit") else 2
    cfg.MODEL.RESNETS.NORM = "naiveSyncBN"
    model = build_on_meta(cfg)
    assert {value.device.type for value in model.state_dict().values()} == {"meta"}
