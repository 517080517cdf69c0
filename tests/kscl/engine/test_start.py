"""A run that starts from weights: where they go, and that the record has their hash."""

from __future__ import annotations

import math
import shutil

import pytest
import torch

from kscl.backbone_file import Description, load_backbone, save_backbone
from kscl.commands.pretrain import main
from kscl.engine.metrics_log import read_metrics
from kscl.engine.pretrain import start_from_weights
from kscl.errors import KsclError
from kscl.keys import load_config
from kscl.methods.base import build_method
from kscl.methods.encoder import build_backbone
from kscl.records.record import RECORD_FILE, read_record
from kscl.run.checkpoint import CHECKPOINT_FOLDER, find_checkpoints
from kscl.runtime.files import sha256_of
from tests.helpers.runs import Run, draw_images, same_bits

KWARGS = {"drop_path_rate": 0.2}
TRAIN_ALL = ["SOLVER.FREEZE_BACKBONE_EPOCHS", 0]
SMALL = ["BACKBONE.NAME", "test_resnet", "BACKBONE.KWARGS", KWARGS, "INPUT.SIZE", 32]


@pytest.fixture
def weights(tmp_path):
    """A file of weights that no seed of a run gives."""
    torch.manual_seed(123)
    path = tmp_path / "start.safetensors"
    state = build_backbone("test_resnet", KWARGS).state_dict()
    save_backbone(path, state, Description("test_resnet", KWARGS))
    return path


def config(*words: object):
    return load_config(None, [str(word) for word in (*SMALL, *words)])


def test_both_encoders_get_the_weights_and_the_random_streams_stay(weights):
    cfg = config("BACKBONE.WEIGHTS", weights)
    learner = build_method(cfg)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    assert start_from_weights(learner, cfg) == {"weights": sha256_of(weights)}
    assert torch.equal(torch.rand(1), expected)
    state = load_backbone(weights).backbone.state_dict()
    for encoder in (learner.encoder, learner.key_encoder):
        assert encoder is not None
        for key, value in encoder.backbone.state_dict().items():
            assert torch.equal(value, state[key]), key
    assert all(weight.requires_grad for weight in learner.encoder.parameters())


@pytest.mark.parametrize("words", [[], ["BACKBONE.WEIGHTS", "random"]])
def test_without_weights_nothing_is_loaded(words):
    cfg = config(*words)
    learner = build_method(cfg)
    before = {key: value.clone() for key, value in learner.state_dict().items()}
    assert start_from_weights(learner, cfg) == {}
    assert all(torch.equal(value, before[key]) for key, value in learner.state_dict().items())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["BACKBONE.WEIGHTS", "none.pth"], r"none\.pth"),
        (["BACKBONE.WEIGHTS", "{weights}", "BACKBONE.NAME", "resnet18"], "test_resnet"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, words, named):
    cfg = config(*(word.format(weights=weights) for word in words))
    with pytest.raises(KsclError, match=named):
        start_from_weights(build_method(cfg), cfg)


def test_of_two_networks_in_a_file_the_chosen_one_is_loaded(tmp_path):
    path, states = tmp_path / "two.pth", {}
    for key in ("model", "model_ema"):
        torch.manual_seed(len(key))
        states[key] = build_backbone("test_resnet", KWARGS).state_dict()
    torch.save(states, path)
    words = ["BACKBONE.WEIGHTS", path, "INPUT.MEAN", [0.5] * 3, "INPUT.STD", [0.5] * 3]
    with pytest.raises(KsclError, match=r"BACKBONE\.CONTAINER"):
        start_from_weights(build_method(config(*words)), config(*words))
    cfg = config(*words, "BACKBONE.CONTAINER", "model_ema")
    learner = build_method(cfg)
    start_from_weights(learner, cfg)
    for key, value in learner.encoder.backbone.state_dict().items():
        assert torch.equal(value, states["model_ema"][key]), key


def test_the_record_has_the_hash_of_the_weights_also_after_a_resume_without_them(weights, tmp_path):
    images = draw_images(tmp_path / "images", count=32)
    words = ["BACKBONE.WEIGHTS", weights, "SOLVER.EPOCHS", 1, *TRAIN_ALL]
    run, digest = Run(tmp_path / "run", images, *words), sha256_of(weights)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert main(run.command()) == 0
        assert read_record(run.folder / RECORD_FILE)["inputs"] == {"weights": digest}
        exported = load_backbone(run.folder / "backbone.safetensors").description
        assert exported.source["start"] == digest
        (run.folder / RECORD_FILE).unlink()
        weights.unlink()
        assert main(run.command("--resume")) == 0
    finally:
        torch.set_num_threads(before)
    assert read_record(run.folder / RECORD_FILE)["inputs"] == {"weights": digest}


def test_a_run_that_has_ended_is_refused_if_its_weights_are_others_now(
    weights, tmp_path, one_thread, error_of
):
    images = draw_images(tmp_path / "images", count=32)
    words = ["SOLVER.EPOCHS", 1, *TRAIN_ALL]
    run = Run(tmp_path / "run", images, "BACKBONE.WEIGHTS", weights, *words)
    assert main(run.command()) == 0
    assert main(run.command("--resume")) == 0
    weights.write_bytes(weights.read_bytes() + b"changed")
    assert f"BACKBONE.WEIGHTS {weights}" in error_of(run.command("--resume"))
    weights.unlink()
    assert main(run.command("--resume")) == 0


@pytest.mark.full
def test_the_projector_is_trained_alone_then_everything_also_when_resumed_around_the_switch(
    weights, tmp_path
):
    """Two ranks; six steps per epoch, a checkpoint every two."""
    images = draw_images(tmp_path / "images")
    words = ["BACKBONE.WEIGHTS", weights, "SOLVER.EPOCHS", 2, "CHECKPOINT.KEEP", 9]
    words += ["SOLVER.BASE_LR", 0.1, "SOLVER.SCALE_LR", False]
    run = Run(tmp_path / "run", images, *words, "LOG.PERIOD", 1, ranks=2)
    run.finish()
    start = load_backbone(weights).backbone.state_dict()
    steps = {}
    for path in find_checkpoints(run.folder / CHECKPOINT_FOLDER):
        saved = torch.load(path, weights_only=True)
        steps[saved["step"]] = saved["learner"]
    assert sorted(steps) == [2, 4, 6, 8, 10, 12]
    for step, learner in steps.items():
        same = [
            torch.equal(learner[f"encoder.backbone.{key}"], value) for key, value in start.items()
        ]
        assert all(same) if step <= 6 else not any(same), step
    head = [key for key in steps[2] if key.startswith("encoder.head.") and key.endswith("weight")]
    assert head
    assert not any(torch.equal(steps[2][key], steps[4][key]) for key in head)
    rates = {row["step"]: row["learning_rate"] for row in read_metrics(run.folder)}
    cosine = {step: 0.05 * (1 + math.cos(math.pi * (step - 1) / 12)) for step in range(1, 13)}
    expected = {step: rate * (1 if step <= 6 else 0.1) for step, rate in cosine.items()}
    assert rates == pytest.approx(expected)
    for last in (4, 6):
        other = Run(tmp_path / f"resumed{last}", images, *words, "LOG.PERIOD", 1, ranks=2)
        shutil.copytree(run.folder, other.folder)
        (other.folder / RECORD_FILE).unlink()
        for path in find_checkpoints(other.folder / CHECKPOINT_FOLDER):
            if torch.load(path, weights_only=True)["step"] > last:
                path.unlink()
        other.finish("--resume")
        for part in ("learner", "optimizer"):
            assert same_bits(other.state()[part], run.state()[part]), (last, part)
