"""Files in Detectron2's own layout become certified weights, whatever their names and channels.

The references are Detectron2's: its loader reads the same file into the detector of its config.
"""

from __future__ import annotations

import functools
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import build_model

from detection.commands.convert import main
from detection.config import load_detection_config, set_network
from detection.convert.certificate import verify_start
from detection.convert.converter import BACKBONE_FILE, convert, convert_back
from detection.convert.proof import draw_images, preprocessed
from detection.convert.weights import load_weights, read_weights
from kscl.backbone_file import load_backbone, named
from kscl.errors import KsclError
from tests.helpers.hub import serve_files
from tests.helpers.networks.backbones import NARROW, lively_backbone
from tests.helpers.networks.checkpoints import some

FPN = "detection/shapes_tiny_fpn.yaml"
C4 = "detection/shapes_tiny_c4.yaml"
ORIGINAL = {**NARROW, "stride_in_1x1": True}  # as MSRA's ResNets
MSRA_KEYS = {
    "INPUT.FORMAT": "BGR",
    "MODEL.PIXEL_MEAN": [103.53, 116.28, 123.675],
    "MODEL.PIXEL_STD": [1.0, 1.0, 1.0],
    "MODEL.RESNETS.STRIDE_IN_1X1": True,
    "MODEL.BACKBONE.NAME": "build_resnet_backbone",
}


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return lively_backbone("resnet50", NARROW).state_dict()


def mocos_names(state, prefix="", head="") -> dict[str, torch.Tensor]:
    """Rename as MoCo's converter does; `head` is the prefix of res5 in a C4."""
    renamed = {}
    for key, value in state.items():
        name = key if "layer" in key else f"stem.{key}"
        for t in (1, 2, 3, 4):
            name = name.replace(f"layer{t}", f"res{t + 1}")
        for t in (1, 2, 3):
            name = name.replace(f"bn{t}", f"conv{t}.norm")
        name = name.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
        renamed[(head if head and "res5" in name else prefix) + name] = value
    return renamed


def caffe2s_names(state) -> dict[str, torch.Tensor]:
    """Rename as the files of detectron2://ImageNetPretrained/MSRA/ are, in Caffe2's names."""
    letters = {"conv1": "2a", "conv2": "2b", "conv3": "2c", "shortcut": "1"}
    norms = {"weight": "gamma", "bias": "beta"}
    renamed = {}
    for key, value in mocos_names(state).items():
        *place, tensor = key.split(".")
        if tensor == "num_batches_tracked":
            continue
        end = f"bn_{norms.get(tensor, tensor)}" if place[-1] == "norm" else "w"
        if place[0] == "stem":
            renamed[f"res_conv1_{end}" if end != "w" else "conv1_w"] = value
        else:
            renamed[f"{place[0]}_{place[1]}_branch{letters[place[2]]}_{end}"] = value
    return renamed


def arrays(tensors) -> dict[str, np.ndarray]:
    return {key: value.numpy() for key, value in tensors.items()}


def moco_pkl(path: Path, state, protocol: int = 4, author: str = "MOCO", **place) -> Path:
    model = arrays(mocos_names(state, **place) | some("stem.fc.0.weight", "stem.fc.2.bias"))
    content = {"model": model, "__author__": author, "matching_heuristics": True}
    path.write_bytes(pickle.dumps(content, protocol))
    return path


def msra_pkl(path: Path, state) -> Path:
    named = arrays(caffe2s_names(state) | some("conv1_b", "fc1000_w", "fc1000_b"))
    path.write_bytes(pickle.dumps(named, protocol=2))
    return path


def network(kwargs=NARROW) -> list[str]:
    return ["--arch", "resnet50", "--arch-kwargs", json.dumps(kwargs)]


def assert_starts_from(folder: Path, state) -> None:
    """Training accepts the folder, and its tensors are those of the network."""
    cfg = load_detection_config(folder / "config.yaml")
    assert verify_start(cfg) is not None
    expected = mocos_names(state)
    found = read_weights(folder / "weights.pth")
    assert len(found) == 265
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize(
    ("place", "protocol"),
    [
        ({}, 4),
        ({"prefix": "backbone.", "head": "roi_heads."}, 2),
        ({"prefix": "backbone.bottom_up."}, 5),
    ],
)
def test_mocos_own_pkl_is_certified_without_any_option(place, protocol, state, tmp_path, capsys):
    path = moco_pkl(tmp_path / "moco.pkl", state, protocol, **place)
    words = [str(path), *network(), "--protocol", C4, "--output-dir", str(tmp_path / "out")]
    assert main(words) == 0
    assert "MOCO, RGB" in capsys.readouterr().out
    assert_starts_from(tmp_path / "out", state)
    certificate = json.loads((tmp_path / "out/certificate.json").read_text())
    assert certificate["source"]["layout"] == "detectron2, RGB"
    keys = certificate["detectron2_keys"]
    assert keys["MODEL.PIXEL_MEAN"] == [123.675, 116.28, 103.53]
    assert keys["MODEL.RESNETS.STRIDE_IN_1X1"] is False
    head = [name for name in certificate["left_behind"] if "fc" in name]
    assert head == ["stem.fc.0.weight", "stem.fc.2.bias"]
    again = ["--to", "timm", "--output-dir", str(tmp_path / "back")]
    assert main([str(tmp_path / "out"), *again]) == 0
    back = load_backbone(tmp_path / "back" / BACKBONE_FILE).backbone.state_dict()
    assert all(torch.equal(back[key], value) for key, value in state.items())


@pytest.mark.parametrize("suffix", ["pkl", "pth", "safetensors"])
def test_files_of_unknown_origin_are_taken_once_all_is_said(suffix, state, tmp_path, capsys):
    path, named = tmp_path / f"model_final.{suffix}", mocos_names(state, "backbone.bottom_up.")
    named |= some("backbone.fpn_output2.weight", "proposal_generator.rpn_head.conv.bias")
    if suffix == "pkl":
        path.write_bytes(pickle.dumps({"model": arrays(named)}))
    elif suffix == "pth":
        torch.save({"model": named, "optimizer": {}, "iteration": 5}, path)
    else:
        safetensors.torch.save_file(named, path)
    words = [str(path), "--protocol", FPN, "--output-dir", str(tmp_path / "out")]
    everything = [
        ("--channels", ["--channels", "RGB"]),
        ("stride_in_1x1", network({**NARROW, "stride_in_1x1": False})),
        ("--mean", ["--mean", "0.5", "0.4", "0.3", "--std", "0.2", "0.2", "0.1"]),
    ]
    words += network()
    for option, said in everything:
        if suffix == "pkl":
            assert main(words) == 2
            assert option in capsys.readouterr().err
        words += said
    assert main(words) == 0
    assert_starts_from(tmp_path / "out", state)


def detector(keys, file: Path | None = None):
    """Build Detectron2's C4 of these keys; its own loader reads the file."""
    cfg = load_detection_config(C4)
    set_network(cfg, keys)
    cfg.MODEL.DEVICE = "cpu"
    model = build_model(cfg).eval()
    if file is not None:
        DetectionCheckpointer(model).load(str(file))
    return cfg, model


@torch.no_grad()
def features(cfg, model) -> torch.Tensor:
    return model.backbone(preprocessed(model, draw_images(), cfg.INPUT.FORMAT))["res4"]


@pytest.mark.portable
def test_msras_bgr_network_computes_in_rgb_what_detectron2_computes_in_bgr(state, tmp_path, capsys):
    path = msra_pkl(tmp_path / "R-50.pkl", state)
    words = [str(path), "--protocol", C4, "--output-dir", str(tmp_path / "out")]
    assert main([*words, *network()]) == 2
    assert "stride_in_1x1" in capsys.readouterr().err
    assert main([*words, *network(ORIGINAL)]) == 0
    cfg = load_detection_config(tmp_path / "out/config.yaml")
    assert cfg.INPUT.FORMAT == "RGB"
    assert cfg.MODEL.RESNETS.STRIDE_IN_1X1 is True
    assert cfg.MODEL.PIXEL_MEAN == [123.675, 116.28, 103.53]
    assert cfg.MODEL.PIXEL_STD == [1.0, 1.0, 1.0]
    certificate = verify_start(cfg)  # compares with the source, whose channels are the other way
    assert certificate.source["layout"] == "caffe2, BGR"
    assert {"conv1_b", "fc1000_w", "fc1000_b"} <= set(certificate.left_behind)
    cfg.MODEL.DEVICE = "cpu"
    ours = build_model(cfg).eval()
    load_weights(ours, tmp_path / "out/weights.pth")
    expected = features(*detector(MSRA_KEYS, path))
    found = features(cfg, ours)
    assert (found - expected).norm() < 1e-4 * expected.norm()
    for wrong in ({"INPUT.FORMAT": "RGB"}, {"MODEL.RESNETS.STRIDE_IN_1X1": False}):
        other = features(*detector(MSRA_KEYS | wrong, path))
        assert (other - expected).norm() > 1e-2 * expected.norm()
    with pytest.raises(KsclError, match="stride_in_1x1"):
        convert_back(tmp_path / "out", tmp_path / "back")


@pytest.mark.portable
def test_a_bgr_detector_is_taken_back_to_a_timm_network_for_rgb(state, tmp_path):
    path = moco_pkl(
        tmp_path / "own.pkl", state, author="own", prefix="backbone.", head="roi_heads."
    )
    config = tmp_path / "config.yaml"
    lines = "INPUT: {FORMAT: BGR}\nMODEL: {PIXEL_MEAN: [103.53, 116.28, 123.675]}\n"
    shipped = Path(__file__).parents[3] / "configs" / C4
    config.write_text(f"_BASE_: {shipped}\nVERSION: 2\n{lines}")
    about = {"arch": "resnet50", "kwargs": NARROW, "protocol": config}
    back = convert_back(path, tmp_path / "back", **about)
    assert back.description.mean == (0.485, 0.456, 0.406)
    found = load_backbone(back.path).backbone.state_dict()
    assert torch.equal(found["conv1.weight"], state["conv1.weight"].flip(1))
    assert torch.equal(found["layer1.0.conv1.weight"], state["layer1.0.conv1.weight"])


def test_an_address_of_detectron2_is_fetched_and_converted(state, tmp_path, monkeypatch, capsys):
    served = tmp_path / "served/ImageNetPretrained/torchvision"
    served.mkdir(parents=True)
    moco_pkl(served / "R-50.pkl", state, author="torchvision")
    monkeypatch.setenv("KSCL_CACHE", str(tmp_path / "cache"))
    with serve_files(tmp_path / "served") as here:
        monkeypatch.setattr(named, "DETECTRON2_FILES", here)
        words = [*network(), "--protocol", C4, "--output-dir", str(tmp_path / "out")]
        missing = "detectron2://ImageNetPretrained/none.pkl"
        assert main([missing, *words]) == 2
        assert missing in capsys.readouterr().err
        assert main(["detectron2://ImageNetPretrained/torchvision/R-50.pkl", *words]) == 0
    assert_starts_from(tmp_path / "out", state)
    certificate = json.loads((tmp_path / "out/certificate.json").read_text())
    source = certificate["source"]
    assert source["name"] == "detectron2://ImageNetPretrained/torchvision/R-50.pkl"
    assert Path(source["path"]).is_relative_to(tmp_path / "cache")


def test_what_is_not_this_network_is_refused_by_name(state, tmp_path):
    path = moco_pkl(tmp_path / "moco.pkl", state)
    refused = functools.partial(convert, output=tmp_path / "out", protocol=C4, kwargs=NARROW)
    with pytest.raises(KsclError, match=r"layer3\.6\.conv1\.weight"):
        refused(path, arch="resnet101")
    deeper = lively_backbone("resnet101", NARROW).state_dict()
    with pytest.raises(KsclError, match=r"res4\.6\.conv1\.weight"):
        refused(moco_pkl(tmp_path / "deeper.pkl", deeper), arch="resnet50")
    with pytest.raises(KsclError, match=r"conv1\.weight is"):
        refused(path, arch="resnet50", kwargs={})
    fused = {k: v for k, v in caffe2s_names(state).items() if "running" not in k}
    (tmp_path / "fused.pkl").write_bytes(pickle.dumps(arrays(fused)))
    with pytest.raises(KsclError, match=r"running_mean"):
        refused(tmp_path / "fused.pkl", arch="resnet50", channels="BGR")
    two = mocos_names(state, "backbone.") | mocos_names(state, "backbone.bottom_up.")
    two["backbone.stem.conv1.weight"] = state["conv1.weight"] + 1
    (tmp_path / "two.pkl").write_bytes(pickle.dumps({"model": arrays(two), "__author__": "MOCO"}))
    with pytest.raises(KsclError, match="two ResNets"):
        refused(tmp_path / "two.pkl", arch="resnet50")
    contradiction = {**NARROW, "stride_in_1x1": True}  # MoCo's networks have it in the 3x3
    with pytest.raises(KsclError, match="stride_in_1x1 must be false, got True"):
        refused(path, arch="resnet50", kwargs=contradiction)
    torch.save(state, tmp_path / "plain.pth")
    with pytest.raises(KsclError, match="--channels"):
        refused(tmp_path / "plain.pth", arch="resnet50", channels="BGR")
    with pytest.raises(KsclError, match="stride_in_1x1"):
        refused("random", arch="resnet18", kwargs={"stride_in_1x1": True})
    assert not (tmp_path / "out").exists()
