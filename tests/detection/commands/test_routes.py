"""Every route of a network into a detector, as a user walks it: pretrain, convert, train, score."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from detectron2.modeling import build_model

from detection.commands.convert import main as convert
from detection.commands.train_net import main as train_net
from detection.config import load_detection_config
from detection.convert.weights import load_weights
from detection.scoring.boxes import Detections
from kscl.backbone_file import read_plain
from kscl.methods.encoder import build_backbone
from kscl.records.record import Record, read_record
from tests.detection.commands.test_train_net_resume import (
    STOP_AT,
    assert_same_run,
    flip_bytes,
    newest_of,
    signal_in_training,
    steps_in,
)
from tests.detection.test_backbones import FROZEN
from tests.helpers.commands import ROOT, tool
from tests.helpers.detection_runs import TrainNet, arguments, start_train_net
from tests.helpers.networks.backbones import NARROW as NARROW_KWARGS
from tests.helpers.networks.small import NETWORKS, pretrained_step

pytestmark = pytest.mark.full

SHORT = ("SOLVER.MAX_ITER", "2", "SOLVER.STEPS", "(1,)", "TEST.PRECISE_BN.NUM_ITER", "1")
RETINANET = (
    *("MODEL.RETINANET.NUM_CLASSES", "2"),
    *("INPUT.MIN_SIZE_TRAIN", "(128,)", "INPUT.MIN_SIZE_TEST", "128"),
)
QUICK = ("resnet18", "convnext_atto", "vit_tiny_patch16_224")
ADAMW = ("convnext", "swin", "vit")  # networks, and the protocols for them
ROUTES = [
    pytest.param(
        name,
        family if (family := name.partition("_")[0]) in ADAMW else "fpn",
        marks=[] if name in QUICK else pytest.mark.slow,
    )
    for name in NETWORKS
]
ROUTES += [pytest.param(name, "retinanet", marks=pytest.mark.slow) for name in NETWORKS]
STAGES = FROZEN | {"regnetx_002": ["stem.", "s1.", "s2.", "s3.", "s4."]}
NARROW = ("random", "--arch", "resnet50", "--arch-kwargs", "{channels: [8, 16, 32, 64]}")
KILLS = 10
KILLED_ROUTES = {  # name: network, its arguments, protocol
    "fpn": ("resnet50", NARROW_KWARGS, "shapes_tiny_fpn"),
    "timm": ("convnext_atto", NETWORKS["convnext_atto"], "shapes_tiny_fpn"),
    "vit": ("vit_tiny_patch16_224", NETWORKS["vit_tiny_patch16_224"], "shapes_tiny_vit"),
    "mask": ("convnext_atto", NETWORKS["convnext_atto"], "shapes_tiny_mask"),
    "retinanet": ("resnet50", NARROW_KWARGS, "shapes_tiny_retinanet"),
}
# On a busy machine a kill comes some iterations late, but never after the last one.
LONG = ("SOLVER.MAX_ITER", str(KILLS + 10), "SOLVER.STEPS", "(8,)", "TEST.PRECISE_BN.NUM_ITER", "1")

Start = Callable[..., TrainNet]


def convert_for(
    shop: Path, source: Path, name: str, protocol: str, route: str | None = None
) -> dict:
    """Convert a file into the shop under a name of its own; return its certificate."""
    folder = shop / f"weights-{name}-{protocol}"
    words = [str(source), "--protocol", f"detection/shapes_tiny_{protocol}.yaml"]
    words += ["--route", route] if route else []
    assert convert([*words, "--output-dir", str(folder), "--force"]) == 0
    return json.loads((folder / "certificate.json").read_text())


def convert_random(shop: Path, name: str, protocol: str, kwargs: Any = None) -> None:
    """Convert a small network with random weights into the shop."""
    words = ["random", "--arch", name, "--arch-kwargs", str(kwargs or NETWORKS[name]), "--force"]
    words += ["--protocol", f"detection/shapes_tiny_{protocol}.yaml"]
    assert convert([*words, "--output-dir", str(shop / f"weights-{name}-{protocol}")]) == 0


def train(shop: Path, output: Path, name: str, protocol: str, *more: str) -> Record:
    """Train and score for two iterations; return the record."""
    words = [*SHORT, *(RETINANET if protocol == "retinanet" else ()), *more]
    done = start_train_net(shop, output, *words, weights=f"-{name}-{protocol}").wait()
    assert done.returncode == 0, done.stderr
    assert "iter: 0 " in done.stdout + done.stderr  # a line after the first iteration
    return read_record(output / "record.json")


@pytest.mark.parametrize(("name", "protocol"), ROUTES)
def test_a_network_goes_from_pretraining_to_a_score(name, protocol, shop, tmp_path):
    source = pretrained_step(tmp_path, name)
    certificate = convert_for(shop, source, name, protocol)
    assert max(certificate["differences"].values()) < 1e-4
    record = train(shop, tmp_path / "detector", name, protocol)
    assert record["inputs"]["weights"] == certificate["weights_sha256"]
    assert record["details"]["backbone"]["arch"] == name
    pyramid = "-simple-pyramid" if name.startswith("vit") else ""
    assert record["protocol"]["id"] == f"shapes-tiny-{protocol}{pyramid}+DATASETS=voc (changed)"
    assert {"AP", "AP50", "AP75"} <= set(record["metrics"])


@pytest.mark.parametrize("frozen", [True, False])
def test_dinov2_trains_whole_or_only_the_detector_on_it(frozen, shop, tmp_path):
    name = "vit_small_patch14_reg4_dinov2"  # patches of 14 pixels, made for images of 518
    convert_random(shop, name, "vit", {"embed_dim": 24, "depth": 1, "num_heads": 2})
    record = train(
        *(shop, tmp_path / "run", name, "vit", "MODEL.BACKBONE.FREEZE_AT", "5" if frozen else "0")
    )
    assert record["details"]["backbone"]["arch"] == name
    files = (shop / f"weights-{name}-vit" / "weights.pth", tmp_path / "run" / "model_final.pth")
    before, after = (read_plain(path)["model"] for path in files)
    kept = {key for key in before if torch.equal(before[key], after[key])}
    assert kept == (set(before) if frozen else set())


@pytest.mark.slow
def test_a_resnet_is_trained_in_timms_own_code_where_that_is_asked_for(shop, tmp_path):
    source = pretrained_step(tmp_path, "resnet18")
    certificate = convert_for(shop, source, "resnet18", "fpn", route="timm")
    assert max(certificate["differences"].values()) < 1e-4
    builder = certificate["detectron2_keys"]["MODEL.BACKBONE.NAME"]
    assert builder == "build_timm_fpn_backbone"
    record = train(shop, tmp_path / "detector", "resnet18", "fpn")
    assert record["config"]["values"]["MODEL"]["BACKBONE"]["NAME"] == builder
    assert record["inputs"]["weights"] == certificate["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "changes", "found"),
    [
        ("fpn", {}, {"AP", "AR100"}),
        ("retinanet", {}, {"AP", "AR100"}),
        ("c4", {"MODEL": {"MASK_ON": True}}, {"AP", "mask/AP"}),
    ],
)
def test_a_tiny_protocol_is_trained_on_drawn_shapes(
    protocol, changes, found, shop, drawn, tmp_path
):
    file, weights = tmp_path / "protocol.yaml", f"-drawn-{protocol}"
    base = str(ROOT / "configs" / "detection" / f"shapes_tiny_{protocol}.yaml")
    file.write_text(yaml.safe_dump({"_BASE_": base, "VERSION": 2, **changes}))
    folder = shop / f"weights{weights}"
    assert convert([*NARROW, "--protocol", str(file), "--output-dir", str(folder)]) == 0
    words = ["KSCL.SCORER", "coco-101pt", "SOLVER.MAX_ITER", "4", "SOLVER.STEPS", "(3,)"]
    words += ["INPUT.MIN_SIZE_TRAIN", "(160,)", "INPUT.MIN_SIZE_TEST", "160", *drawn]
    words += ["MODEL.RETINANET.NUM_CLASSES", "2"]
    done = start_train_net(shop, tmp_path / "run", *words, weights=weights).wait()
    assert done.returncode == 0, done.stderr
    assert found <= set(read_record(tmp_path / "run" / "record.json")["metrics"])


@pytest.mark.slow
def test_the_shipped_mask_protocol_runs_from_drawn_shapes_to_its_record(tmp_path):
    """As a user runs it, nothing shortened: thousands of masks are scored at the end."""
    few = ["--unlabeled", "1", "--train", "5", "--val", "5"]  # not part of detection
    long = {"cwd": tmp_path, "timeout": 3600}
    drawn = tool(
        "make_shapes", "--output-dir", "datasets/shapes", "--num-classes", "5", *few, **long
    )
    assert drawn.returncode == 0, drawn.stderr
    protocol = ROOT / "configs" / "detection" / "shapes_tiny_mask.yaml"
    words = [*NARROW, "--protocol", protocol, "--output-dir", "weights"]
    converted = tool("convert", *words, **long)
    assert converted.returncode == 0, converted.stderr
    words = ["--config-file", "weights/config.yaml", "OUTPUT_DIR", "run"]
    done = tool("train_net", *words, **long)
    assert done.returncode == 0, done.stderr
    record = read_record(tmp_path / "run" / "record.json")
    assert record["protocol"]["id"] == "shapes-tiny-mask"
    assert {"AP", "mask/AP", "mask/AP50", "mask/APs"} <= set(record["metrics"])
    masks = Detections.read(tmp_path / "run" / "detections.npz").masks
    assert masks is not None
    assert len(masks) > 255


MY_NET = """
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.modeling.meta_arch.retinanet import RetinaNet

from detection.config import META_ARCHITECTURES, MetaArchitecture


@META_ARCH_REGISTRY.register()
class MyNet(RetinaNet):
    pass


META_ARCHITECTURES.register("MyNet", MetaArchitecture("MODEL.RETINANET.NUM_CLASSES", coarsest=128))
"""


def test_a_meta_architecture_of_ones_own_is_one_file(shop, tmp_path, monkeypatch):
    (tmp_path / "my_net.py").write_text(MY_NET)
    monkeypatch.chdir(tmp_path)
    base = str(ROOT / "configs" / "detection" / "shapes_tiny_retinanet.yaml")
    about = {"_BASE_": base, "VERSION": 2, "MODEL": {"META_ARCHITECTURE": "MyNet"}}
    (tmp_path / "protocol.yaml").write_text(yaml.safe_dump(about))
    words = ["--import", "my_net", *NARROW, "--protocol", "protocol.yaml"]
    assert convert([*words, "--output-dir", str(shop / "weights-my-net")]) == 0
    words = ["--import=my_net", *SHORT, *RETINANET]
    assert train_net(arguments(shop, tmp_path / "run", *words, weights="-my-net")) == 0
    values = read_record(tmp_path / "run" / "record.json")["config"]["values"]
    assert values["MODEL"]["META_ARCHITECTURE"] == "MyNet"


@pytest.mark.slow
def test_two_ranks_train_a_transformer_without_a_warning(shop, tmp_path):
    name = "vit_tiny_patch16_224"
    convert_random(shop, name, "fpn")
    train(shop, tmp_path / "run", name, "fpn", "--num-gpus=2")
    assert "Warning" not in (tmp_path / "run.stderr").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "norm", "freeze_at", "ranks"),
    [("efficientnet_lite0", "FrozenBN", 2, 1), ("regnetx_002", "naiveSyncBN", 3, 2)],
)
def test_a_timm_network_trains_with_frozen_stages_and_other_norms(
    name, norm, freeze_at, ranks, shop, tmp_path
):
    convert_random(shop, name, "fpn")
    words = ["MODEL.RESNETS.NORM", norm, "MODEL.BACKBONE.FREEZE_AT", str(freeze_at)]
    record = train(shop, tmp_path / "run", name, "fpn", f"--num-gpus={ranks}", *words)
    assert record["details"]["processes"] == ranks
    files = (shop / f"weights-{name}-fpn" / "weights.pth", tmp_path / "run" / "model_final.pth")
    before, after = (read_plain(path)["model"] for path in files)
    for number, stage in enumerate(STAGES[name], 1):
        weights = [key for key in before if f"network.{stage}" in key and before[key].ndim == 4]
        same = {torch.equal(before[key], after[key]) for key in weights}
        assert same == {number <= freeze_at}, stage


def test_a_detector_that_was_not_certified_is_refused_by_key(shop, tmp_path, capsys):
    fpn = ["MODEL.BACKBONE.NAME", "build_resnet_fpn_backbone"]
    fpn += ["MODEL.ROI_HEADS.NAME", "StandardROIHeads"]
    assert train_net(arguments(shop, tmp_path / "run", *fpn)) == 2
    told = capsys.readouterr().err
    assert "MODEL.BACKBONE.NAME is build_resnet_fpn_backbone" in told
    assert "MODEL.ROI_HEADS.NAME is StandardROIHeads" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arch", "protocol", "reason"),
    [
        ("resnet18", "c4", "three bottleneck blocks"),
        ("regnetx_002", "c4", "FPN or RetinaNet protocol"),
        ("convit_tiny", "fpn", "has no feature_info"),
        ("resnet18", "vit", "KSCL.LAYER_DECAY and KSCL.DROP_PATH"),
        ("nest_tiny", "fpn", "strides 4, 8, 16, and"),
    ],
)
def test_a_network_that_does_not_fit_is_refused_before_anything_is_written(
    arch, protocol, reason, tmp_path, capsys
):
    name, _, kwargs = arch.partition(" ")
    words = ["random", "--arch", name, "--arch-kwargs", kwargs or "{}"]
    words += ["--protocol", f"detection/shapes_tiny_{protocol}.yaml"]
    assert convert([*words, "--output-dir", str(tmp_path / "out")]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("route", "overrides", "reasons"),
    [
        # It has its own key of classes, and its images are too small.
        ("retinanet", [], ["MODEL.RETINANET.NUM_CLASSES", "INPUT.MIN_SIZE_TRAIN", "stride of 128"]),
        (
            "fpn",
            ["INPUT.MIN_SIZE_TRAIN", "(64, 63)", "INPUT.MIN_SIZE_TEST", "63"],
            ["INPUT.MIN_SIZE_TRAIN", "INPUT.MIN_SIZE_TEST", "stride of 64"],
        ),
        ("mask", [], ["MODEL.MASK_ON", "mask"]),  # the set has none
    ],
)
def test_what_does_not_fit_a_route_is_told_before_training(
    shop, tmp_path, capsys, route, overrides, reasons
):
    protocol = ["--protocol", f"detection/shapes_tiny_{route}.yaml"]
    assert convert([*NARROW, *protocol, "--output-dir", str(shop / f"weights-no-{route}")]) == 0
    assert train_net(arguments(shop, tmp_path / "run", *overrides, weights=f"-no-{route}")) == 2
    told = capsys.readouterr().err
    assert [reason for reason in reasons if reason not in told] == []
    assert not (tmp_path / "run").exists()


def test_a_network_that_does_not_keep_the_promise_of_its_feature_info_is_refused(
    tmp_path, capsys, monkeypatch
):
    def wider(name: str, kwargs: dict) -> Any:
        network: Any = build_backbone(name, kwargs)
        network.feature_info[-1]["num_chs"] += 1
        return network

    monkeypatch.setattr("detection.backbones.build_backbone", wider)
    words = ["random", "--arch", "resnet18", "--route", "timm"]
    words += ["--protocol", "detection/shapes_tiny_fpn.yaml"]
    assert convert([*words, "--output-dir", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "(1, 512, 3, 5) at res5 where its feature_info promises (1, 513, 3, 5)" in told
    assert not (tmp_path / "out").exists()


def test_both_routes_give_a_detector_the_same_features(tmp_path):
    images = torch.rand(1, 3, 64, 96)
    features = []
    for route in ("exact", "timm"):
        folder = tmp_path / route
        words = ["random", "--arch", "resnet18", "--route", route, "--output-dir", str(folder)]
        assert convert([*words, "--protocol", "detection/shapes_tiny_fpn.yaml"]) == 0
        cfg = load_detection_config(folder / "config.yaml", ["MODEL.DEVICE", "cpu"])
        model = build_model(cfg).eval()
        load_weights(model, cfg.MODEL.WEIGHTS)
        with torch.no_grad():
            features.append(model.backbone.bottom_up(images))
    assert set(features[0]) == set(features[1]) == {"res2", "res3", "res4", "res5"}
    for name, values in features[0].items():
        torch.testing.assert_close(values, features[1][name])


@pytest.fixture(params=KILLED_ROUTES)
def start(request, shop, drawn) -> Start:
    """A function that starts a training on a route in a process of its own."""
    network, kwargs, protocol = KILLED_ROUTES[request.param]
    weights = f"-kill-{request.param}"
    words = ["random", "--arch", network, "--arch-kwargs", str(kwargs), "--force"]
    words += ["--protocol", f"detection/{protocol}.yaml"]
    assert convert([*words, "--output-dir", str(shop / f"weights{weights}")]) == 0
    needed = {"mask": drawn, "retinanet": RETINANET}.get(request.param, [])

    def on_route(output: Path, *more: str, **options: object) -> TrainNet:
        return start_train_net(shop, output, *needed, *LONG, *more, weights=weights, **options)

    return on_route


def assert_finished(done: TrainNet, at_least: int) -> None:
    """Assert that a run ended well, and that it had resumed and not begun again."""
    assert done.returncode == 0, done.stderr
    (begun,) = re.findall(r"Training starts at iteration (\d+) of", done.stdout)
    assert int(begun) >= at_least


def leads_its_group(run: TrainNet) -> bool:
    """Say whether a run can be killed as a whole: one that has just been forked cannot."""
    return os.getpgid(run.process.pid) == run.process.pid


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ten_kills_change_nothing(start, ranks, tmp_path):
    words = (f"--num-gpus={ranks}", "--auto-resume")
    undisturbed, output = tmp_path / "undisturbed", tmp_path / "killed"
    assert_finished(start(undisturbed, *words).wait(), 0)
    for kill in range(1, KILLS + 1):
        run = start(output, *words)
        while max(steps_in(output), default=0) < kill or not leads_its_group(run):
            assert run.process.is_alive(), run.stderr
            time.sleep(0.01)
        time.sleep(0.03 * (kill % 4))  # in a save, a step or between them
        os.killpg(run.process.pid, signal.SIGKILL)
        run.wait()
        assert not (output / "record.json").exists()
    assert_finished(start(output, *words).wait(), KILLS)
    assert_same_run(output, undisturbed)


@pytest.mark.slow
def test_a_signal_saves_and_a_damaged_checkpoint_is_passed_over(start, tmp_path):
    undisturbed, output = tmp_path / "undisturbed", tmp_path / "stopped"
    words = ("SOLVER.CHECKPOINT_PERIOD", "2")  # the signal comes between two periods
    assert_finished(start(undisturbed, *words).wait(), 0)
    done = start(output, *words, before=signal_in_training, told=[signal.SIGTERM]).wait()
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert steps_in(output) == [STOP_AT + 1, STOP_AT]
    damaged = newest_of(output)
    flip_bytes(damaged)
    done = start(output, "--resume", *words).wait()
    assert_finished(done, STOP_AT)
    assert damaged.name in done.stderr + done.stdout
    assert_same_run(output, undisturbed)
