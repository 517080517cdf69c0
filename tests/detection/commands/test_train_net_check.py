"""What would stop a fine-tuning is found by its check, and at its start before it has a folder."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from detection.commands.train_net import main
from detection.config import load_detection_config, set_network
from detection.convert.routes import choose_route
from detection.train.check import build_on_paper
from kscl.config.shipped import shipped_configs
from kscl.method.encoder import build_backbone
from tests.helpers.detection_runs import arguments
from tests.helpers.networks.small import NETWORKS

PROTOCOLS = sorted(path.stem for path in (shipped_configs() / "detection").glob("[!_]*.yaml"))
SCRATCH = ("MODEL.WEIGHTS", "", "KSCL.FROM_SCRATCH", "True")
FPN = (
    *("MODEL.BACKBONE.NAME", "build_timm_fpn_backbone", "MODEL.FPN.OUT_CHANNELS", "8"),
    *("MODEL.RESNETS.OUT_FEATURES", "['res2', 'res3', 'res4', 'res5']"),
    *("MODEL.FPN.IN_FEATURES", "['res2', 'res3', 'res4', 'res5']"),
)


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


def test_a_disk_without_room_for_a_checkpoint_is_told_by_the_check(
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


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_shipped_detector_is_checked_without_memory_or_random_numbers(protocol):
    before = torch.random.get_rng_state()
    model = build_on_paper(load_detection_config(f"detection/{protocol}.yaml"))
    assert {value.device.type for value in model.state_dict().values()} == {"meta"}
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_of_timms_is_checked_so_with_frozen_stages_and_other_norms(name):
    cfg = load_detection_config("detection/shapes_tiny_fpn.yaml")
    network = build_backbone(name, NETWORKS[name])
    set_network(cfg, choose_route(network, name, NETWORKS[name], cfg, "timm").keys)
    cfg.MODEL.BACKBONE.FREEZE_AT = 0 if name.startswith("vit") else 2
    cfg.MODEL.RESNETS.NORM = "naiveSyncBN"
    model = build_on_paper(cfg)
    assert {value.device.type for value in model.state_dict().values()} == {"meta"}
