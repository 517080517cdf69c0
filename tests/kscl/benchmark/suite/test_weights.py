"""Weights that a suite names: files of public layouts, and failures before a stage runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from urllib.parse import urlparse

import pytest
import torch
import yaml

from kscl.backbone_file import find_weights, load_backbone
from kscl.benchmark.leaderboard.rows import build_board
from kscl.benchmark.suite.check import fetch_weights
from kscl.benchmark.suite.spec import read_suite
from kscl.commands import run_suite
from kscl.methods.encoder import build_backbone
from kscl.records.record import find_records, read_record
from tests.helpers import hub as hubs
from tests.helpers.chain import NETWORK, smoke_suite
from tests.helpers.commands import ROOT
from tests.helpers.networks import checkpoints

PUBLIC = ROOT / "configs/suites/public_checkpoints.yaml"
Make = Callable[[dict[str, torch.Tensor]], dict[str, object]]


def as_it_is(state: dict[str, torch.Tensor]) -> dict[str, object]:
    return dict(state)


def moco(state: dict[str, torch.Tensor]) -> dict[str, object]:
    return {**checkpoints.moco(state, state), "arch": "resnet50"}


# What the released files hold
LAYOUTS: dict[str, Make] = {
    "supervised": lambda state: checkpoints.torchvision(state, state),
    **dict.fromkeys(("moco_v1", "moco_v2", "moco_v2_800ep"), moco),
    "simclr": lambda state: checkpoints.vissl(state, state),
    "swav": lambda state: checkpoints.swav(state, state)["state_dict"],
    **dict.fromkeys(("dino", "barlow_twins", "vicreg"), as_it_is),
    "densecl": lambda state: {"state_dict": dict(state), "author": "DenseCL"},
}


@pytest.fixture
def public(tmp_path, monkeypatch):
    """The public suite on this machine: small files of the same layouts, kNN on small shapes."""
    about = yaml.safe_load(PUBLIC.read_text())
    assert set(about["contenders"]) == set(LAYOUTS)
    monkeypatch.setenv("KSCL_CACHE", str(tmp_path / "kscl"))
    torch.manual_seed(0)
    state = build_backbone("resnet50", NETWORK).state_dict()
    smoke = yaml.safe_load(smoke_suite(tmp_path).read_text())
    with hubs.serve_files(tmp_path / "served") as here:
        for name, make in LAYOUTS.items():
            contender = about["contenders"][name] | {"arch": "resnet50", "kwargs": NETWORK}
            path = urlparse(contender["file"]).path.lstrip("/")  # of torchvision: a name
            file = tmp_path / "served" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(make(state), file)
            if "checksum" in contender:
                digest = hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()
                contender["checksum"] = f"md5:{digest[:8]}"
            about["contenders"][name] = contender | {"file": here + path}
        about |= {"output_dir": str(tmp_path / "output"), "num_gpus": 1, "shapes": smoke["shapes"]}
        about["evaluations"] = {"knn": smoke["evaluations"]["knn"]}
        yield about, state, tmp_path / "suite.yaml"


def test_public_checkpoints_are_fetched_checked_and_read(public):
    about, state, path = public
    path.write_text(yaml.safe_dump(about))
    suite = read_suite(path)
    assert fetch_weights(suite) == []
    for contender in suite.contenders:
        found = load_backbone(contender.file, contender.arch, contender.kwargs).backbone
        for key, value in found.state_dict().items():
            assert torch.equal(value, state[key]), (contender.name, key)


@pytest.mark.full
def test_one_of_them_alone_makes_one_row(public, capfd):
    about, _, path = public
    path.write_text(yaml.safe_dump(about))
    assert run_suite.main([str(path), "--only", "moco_v2"]) == 0, capfd.readouterr().err
    records = find_records(path.parent / "output").records
    assert {record.name for record in records.values()} == {"moco_v2"}
    assert "moco_v2" in capfd.readouterr().out
    assert run_suite.main([str(path), "--only", "moco_v3"]) == 2
    assert "moco_v2" in capfd.readouterr().err


@pytest.mark.full
def test_every_failure_of_weights_is_named_before_the_first_stage(tmp_path, monkeypatch, capfd):
    with hubs.serve(tmp_path) as hub:
        hubs.use(monkeypatch, tmp_path, hub.address)
        digest = hub.push("timm/test_resnet.r160_in1k", build_backbone("test_resnet").state_dict())
        small = tmp_path / "small.pth"
        torch.save(build_backbone("test_resnet").state_dict(), small)
        start = {"pretrain": "pretrain/shapes_kscl.yaml"}
        contenders = {
            "misspelt": {"file": "timm:test_resnt.r160_in1k"},
            "not_there": {"file": "hf-hub:me/nothing"},
            "other_file": {"file": str(small), "arch": "test_resnet", "checksum": "md5:00000000"},
            "good": {"file": "timm:test_resnet.r160_in1k", "checksum": f"sha256:{digest}"},
            "start": start | {"overrides": {"BACKBONE.WEIGHTS": f"{hubs.NOWHERE}/moco.pth"}},
        }
        suite = smoke_suite(tmp_path, contenders=contenders)
        monkeypatch.setattr("kscl.runtime.paths.ATTEMPTS", 1)
        assert run_suite.main([str(suite)]) == 2
        said = capfd.readouterr().err
        for name in ("misspelt", "not_there", "other_file", "start"):
            assert f"contender {name}: " in said
        assert "contender good" not in said
        assert "timm:test_resnet.r160_in1k" in said
        assert not (tmp_path / "output").exists()
        wrong_network = {"BACKBONE.WEIGHTS": "timm:test_resnet.r160_in1k"}  # and it is a ResNet-50
        knn = {"knn": yaml.safe_load(suite.read_text())["evaluations"]["knn"]}
        contenders = {"start": start | {"overrides": wrong_network}}
        smoke_suite(tmp_path, contenders=contenders, evaluations=knn)
        assert run_suite.main([str(suite)]) == 2
        assert "test_resnet, not resnet50" in capfd.readouterr().err
        assert not list((tmp_path / "output").glob("start*"))


@pytest.mark.slow
def test_what_one_would_do_anyway_is_compared_offline_from_a_cache(tmp_path, monkeypatch, capfd):
    name = "timm:test_resnet.r160_in1k"
    with hubs.serve(tmp_path) as hub:
        hubs.use(monkeypatch, tmp_path, hub.address)
        hub.push("timm/test_resnet.r160_in1k", build_backbone("test_resnet").state_dict())
        find_weights(name)
    hubs.use(monkeypatch, tmp_path, offline=True)
    about = yaml.safe_load(smoke_suite(tmp_path).read_text())
    shared = about["pretrain_overrides"] | {"BACKBONE.NAME": "test_resnet"}
    shared |= {"INPUT.MEAN": [0.5] * 3, "INPUT.STD": [0.5] * 3, "METHOD.NUM_SHOTS": 2}
    pretrain = {"pretrain": "pretrain/small_moco.yaml"}
    kscl = {"METHOD.SIMILARITY": "projection"}
    about["evaluations"]["detection"]["config"] = "detection/shapes_tiny_fpn.yaml"
    path = smoke_suite(
        tmp_path,
        pretrain_overrides=shared,
        evaluations=about["evaluations"],
        baseline=["random", "random_longer"],
        contenders={
            "random": {"arch": "test_resnet"},
            "random_longer": {"arch": "test_resnet", "longer": {"detection": 2.0}},
            "imagenet": {"file": name},
            "kscl": pretrain | {"overrides": kscl},
            "continued": pretrain | {"overrides": kscl | {"BACKBONE.WEIGHTS": name}},
        },
    )
    assert run_suite.main([str(path)]) == 0, capfd.readouterr().err
    (record,) = (
        read_record(file) for file in (tmp_path / "output/random_longer").rglob("record.json")
    )
    assert record.details["longer"] == 2.0
    board = build_board([tmp_path / "output"], check_stale=False, with_reported=False)
    by_kind = {section.protocol.kind: len(section.rows) for section in board.sections}
    assert by_kind == {"knn": 4, "detection": 5}  # nearest neighbors train nothing
    assert "different backbones" not in capfd.readouterr().err
