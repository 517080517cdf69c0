"""The way back: a Detectron2 ResNet becomes the timm network that it came from, to the bit."""

from __future__ import annotations

import json
import pickle

import pytest
import timm
import torch

from detection.commands.convert import main
from detection.convert.converter import BACKBONE_FILE, convert, convert_back
from detection.convert.weights import read_weights
from kscl.backbone_file import Description, load_backbone, save_backbone
from kscl.errors import KsclError
from kscl.runtime.files import sha256_of
from tests.helpers.networks.backbones import NARROW, backbone_file, lively_backbone
from tests.helpers.networks.checkpoints import moco, some
from tests.helpers.networks.small import NETWORKS

INPUT = {"mean": (0.5, 0.4, 0.3), "std": (0.25, 0.2, 0.1)}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A backbone with counters as after training, and an input that is nobody else's."""
    path = tmp_path_factory.mktemp("source") / "backbone.safetensors"
    state = lively_backbone("resnet50", NARROW).state_dict()
    for number, name in enumerate(state):
        if name.endswith("num_batches_tracked"):
            state[name] = torch.tensor(1000 + number)
    run = {"method": "kscl", "epochs": 2, "seed": 0}
    save_backbone(path, state, Description("resnet50", NARROW, **INPUT, source=run))
    return path


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    return convert(source, tmp_path_factory.mktemp("converted") / "d2")


def test_the_round_trip_is_equal_to_the_bit(source, converted, tmp_path, capsys):
    words = [str(converted.folder), "--to", "timm", "--output-dir", str(tmp_path)]
    assert main(words) == 0
    assert "equal to the bit" in capsys.readouterr().out
    back, before = load_backbone(tmp_path / BACKBONE_FILE), load_backbone(source)
    assert back.tensors_sha256 == before.tensors_sha256  # counters included
    assert back.description == before.description
    assert sha256_of(tmp_path / BACKBONE_FILE) == sha256_of(source)
    again = convert(tmp_path / BACKBONE_FILE, tmp_path / "again")
    assert again.certificate.weights_sha256 == converted.certificate.weights_sha256
    model = timm.create_model("resnet50", num_classes=0, channels=tuple(NARROW["channels"]))
    timm.models.load_checkpoint(model, str(tmp_path / BACKBONE_FILE))


def test_a_detectors_checkpoint_gives_back_its_resnet(converted, tmp_path):
    weights = read_weights(converted.weights)
    names = {k: f"{'roi_heads' if k.startswith('res5') else 'backbone'}.{k}" for k in weights}
    model = {names[key]: value for key, value in weights.items()}
    model |= some("proposal_generator.rpn_head.conv.weight", "roi_heads.res5.norm.weight")
    torch.save({"model": model, "optimizer": {}, "iteration": 5}, tmp_path / "model_final.pth")
    about = {"arch": "resnet50", "kwargs": NARROW, "protocol": converted.folder / "config.yaml"}
    back = convert_back(tmp_path / "model_final.pth", tmp_path / "back", **about)
    assert len(back.left_behind) == 2
    assert back.description.mean == INPUT["mean"]
    again = convert(back.path, tmp_path / "again")
    found = read_weights(again.weights)
    assert all(torch.equal(found[key], value) for key, value in weights.items())


@pytest.mark.parametrize(
    ("arch", "protocol"),
    [
        ("resnet50", "mask"),
        pytest.param("resnet18", "fpn", marks=pytest.mark.full),
        pytest.param("resnet18", "retinanet", marks=pytest.mark.slow),
    ],
)
def test_the_round_trip_through_a_pyramid_is_equal_to_the_bit(arch, protocol, tmp_path, capsys):
    kwargs = NARROW if arch == "resnet50" else {}
    source = backbone_file(tmp_path, arch, kwargs)
    words = [str(source), "--protocol", f"detection/shapes_tiny_{protocol}.yaml"]
    assert main([*words, "--output-dir", str(tmp_path / "d2")]) == 0
    words = [str(tmp_path / "d2"), "--to", "timm", "--output-dir", str(tmp_path / "back")]
    assert main(words) == 0
    assert "equal to the bit" in capsys.readouterr().out
    assert sha256_of(tmp_path / "back" / BACKBONE_FILE) == sha256_of(source)


def test_a_timm_network_in_a_detector_is_not_taken_back(tmp_path, capsys):
    words = ["random", "--arch", "convnext_atto", "--arch-kwargs", str(NETWORKS["convnext_atto"])]
    words += ["--protocol", "detection/shapes_tiny_fpn.yaml"]
    assert main([*words, "--output-dir", str(tmp_path / "d2")]) == 0
    words = [str(tmp_path / "d2"), "--to", "timm", "--output-dir", str(tmp_path / "back")]
    assert main(words) == 2
    assert "MODEL.BACKBONE.NAME build_timm_fpn_backbone" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_a_pkl_of_arrays_is_taken_back(converted, tmp_path):
    arrays = {key: value.numpy() for key, value in read_weights(converted.weights).items()}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"model": arrays, "__author__": "x"}))
    about = {"arch": "resnet50", "kwargs": NARROW, "protocol": converted.folder / "config.yaml"}
    assert convert_back(tmp_path / "x.pkl", tmp_path / "back", **about).path.is_file()


def spoiled(converted, tmp_path, key: str, value: str):
    text = (converted.folder / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace(key, value))
    return tmp_path / "config.yaml"


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("STRIDE_IN_1X1: false", "STRIDE_IN_1X1: true", "STRIDE_IN_1X1"),
        ("RES5_DILATION: 1", "RES5_DILATION: 2", "res5"),
    ],
)
def test_a_config_under_which_timm_computes_something_else_is_refused(
    converted, tmp_path, key, value, named
):
    config = spoiled(converted, tmp_path, key, value)
    torch.save({"model": read_weights(converted.weights)}, tmp_path / "x.pth")
    about = {"arch": "resnet50", "kwargs": NARROW, "protocol": config}
    with pytest.raises(KsclError, match=named):
        convert_back(tmp_path / "x.pth", tmp_path / "back", **about)
    assert not (tmp_path / "back").exists()


def test_what_cannot_be_taken_back_is_named(converted, tmp_path):
    torch.save({"model": read_weights(converted.weights)}, tmp_path / "x.pth")
    config = converted.folder / "config.yaml"
    whole = {"arch": "resnet50", "kwargs": NARROW, "protocol": config}
    cases = {
        "--arch": {},
        "--protocol": {"arch": "resnet50"},
        r"layer3\.6\.conv1\.weight": whole | {"arch": "resnet101"},
        "another size": whole | {"kwargs": {}},
    }
    for named, about in cases.items():
        with pytest.raises(KsclError, match=named):
            convert_back(tmp_path / "x.pth", tmp_path / "back", **about)
    with pytest.raises(KsclError, match="Leave --arch"):
        convert_back(converted.folder, tmp_path / "back", arch="resnet50")
    with pytest.raises(KsclError, match=r"none\.pth"):
        convert_back(tmp_path / "none.pth", tmp_path / "back")
    torch.save({"model": some("conv1.weight")}, tmp_path / "y.pth")
    with pytest.raises(KsclError, match=r"y\.pth holds no ResNet"):
        convert_back(tmp_path / "y.pth", tmp_path / "back", **whole)
    assert not (tmp_path / "back").exists()


def test_a_backbone_that_is_there_is_kept(converted, tmp_path):
    (tmp_path / BACKBONE_FILE).write_bytes(b"mine")
    with pytest.raises(KsclError, match="--force"):
        convert_back(converted.folder, tmp_path)
    assert (tmp_path / BACKBONE_FILE).read_bytes() == b"mine"


def test_weights_that_were_changed_are_refused(converted, tmp_path):
    for path in converted.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    certificate["counters"] = dict.fromkeys(certificate["counters"], 0)
    (tmp_path / "certificate.json").write_text(json.dumps(certificate))
    with pytest.raises(KsclError, match="are not those of the source"):
        convert_back(tmp_path, tmp_path / "back")


def test_the_tool_says_which_network_it_took_and_takes_the_other_if_told(tmp_path, capsys):
    one, two = (lively_backbone("resnet50", NARROW, seed).state_dict() for seed in (1, 2))
    torch.save(moco(one, two) | {"arch": "resnet50"}, tmp_path / "moco.pth")
    network = ["--arch", "resnet50", "--arch-kwargs", json.dumps(NARROW)]
    words = [str(tmp_path / "moco.pth"), *network, "--output-dir"]
    assert main([*words, str(tmp_path / "query")]) == 0
    assert "Took the query encoder" in capsys.readouterr().out
    place = ["--container", "state_dict", "--prefix", "module.encoder_k."]
    color = ["--mean", "0.4", "0.4", "0.4", "--std", "0.2", "0.2", "0.2"]
    assert main([*words, str(tmp_path / "key"), *place]) == 2
    assert "--mean" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "key"), *place, *color]) == 0
    certificate = json.loads((tmp_path / "key/certificate.json").read_text())
    assert certificate["source"]["prefix"] == "module.encoder_k."
    assert "module.encoder_q.conv1.weight" in certificate["left_behind"]
    kept = read_weights(tmp_path / "key/weights.pth")
    assert torch.equal(kept["stem.conv1.weight"], two["conv1.weight"])
    with pytest.raises(KsclError, match="needs no conversion"):
        load_backbone(tmp_path / "key/weights.pth", "resnet50", NARROW)
