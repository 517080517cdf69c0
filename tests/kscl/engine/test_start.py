"""A run that starts from weights: where they go, and that the record has their hash."""

from __future__ import annotations

import pytest
import torch

from kscl.backbone_file import Description, load_backbone, save_backbone
from kscl.commands.pretrain import main
from kscl.engine.pretrain import start_from_weights
from kscl.errors import KsclError
from kscl.keys import load_config
from kscl.methods.base import build_method
from kscl.methods.encoder import build_backbone
from kscl.records.record import RECORD_FILE, read_record
from kscl.runtime.files import sha256_of
from tests.helpers.runs import Run, draw_images

KWARGS = {"drop_path_rate": 0.2}
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


def test_without_the_key_nothing_is_loaded():
    cfg = config()
    learner = build_method(cfg)
    before = {key: value.clone() for key, value in learner.state_dict().items()}
    assert start_from_weights(learner, cfg) == {}
    assert all(torch.equal(value, before[key]) for key, value in learner.state_dict().items())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["BACKBONE.WEIGHTS", "random"], "BACKBONE.WEIGHTS is 'random'"),
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
    words = ["BACKBONE.WEIGHTS", weights, "SOLVER.EPOCHS", 1]
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
    run = Run(tmp_path / "run", images, "BACKBONE.WEIGHTS", weights, "SOLVER.EPOCHS", 1)
    assert main(run.command()) == 0
    assert main(run.command("--resume")) == 0
    weights.write_bytes(weights.read_bytes() + b"changed")
    assert f"BACKBONE.WEIGHTS {weights}" in error_of(run.command("--resume"))
    weights.unlink()
    assert main(run.command("--resume")) == 0
