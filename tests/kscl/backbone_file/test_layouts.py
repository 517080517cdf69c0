"""Every layout in the table, from files with the key names of the real projects."""

from __future__ import annotations

import pytest
import torch

from kscl.backbone_file import LAYOUTS, load_backbone, tensors_hash
from kscl.backbone_file.layouts import SWAV_INPUT
from kscl.errors import KsclError
from kscl.methods.encoder import build_backbone
from tests.helpers.networks.checkpoints import CHECKPOINTS, dino, mae, under

NARROW = {"channels": [8, 16, 32, 64]}
SMALL_VIT = {"img_size": 32, "depth": 1, "embed_dim": 12, "num_heads": 2}
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
ASKED = [name for name, layout in LAYOUTS.items() if layout.input is None]


def states(arch: str, kwargs: dict, count: int = 2) -> list[dict]:
    torch.manual_seed(0)
    return [build_backbone(arch, kwargs).state_dict() for _ in range(count)]


@pytest.fixture(scope="module")
def networks():
    """Two networks: the one that a project's evaluation uses, and the other one."""
    return states("resnet18", NARROW)


def load(path, arch="resnet18", kwargs=NARROW, **more):
    return load_backbone(path, arch, kwargs, **more)


def hash_of(arch: str, kwargs: dict, state: dict) -> str:
    backbone = build_backbone(arch, kwargs)
    backbone.load_state_dict(state)
    return tensors_hash(backbone)


@pytest.mark.parametrize("project", CHECKPOINTS)
def test_a_checkpoint_is_read_as_its_project_would(networks, tmp_path, project):
    make, layout, second = CHECKPOINTS[project]
    path, content = tmp_path / "x.pth", make(*networks)
    torch.save(content, path)
    given = IMAGENET if layout in ASKED else {}
    loaded = load(path, **given)
    assert loaded.layout == layout
    assert loaded.tensors_sha256 == hash_of("resnet18", NARROW, networks[0])
    taken = [sentence for sentence in loaded.said if sentence.startswith("Took")]
    assert len(taken) == int(second)
    node = content
    for key in LAYOUTS[layout].container:
        node = node.get(key, node)
    unused = [key for key in loaded.left_behind if not key.startswith("[")]
    assert len(unused) == len([k for k in node.values() if torch.is_tensor(k)]) - len(networks[0])


@pytest.mark.parametrize("project", CHECKPOINTS)
def test_a_tensor_that_its_project_does_not_know_is_refused_by_name(networks, tmp_path, project):
    make, layout, _ = CHECKPOINTS[project]
    content = make(*networks)
    node = content
    for key in LAYOUTS[layout].container:
        node = node.get(key, node)
    node["neck9.weight"] = torch.zeros(2)
    torch.save(content, tmp_path / "x.pth")
    with pytest.raises(KsclError, match=r"neck9\.weight|choose one"):
        load(tmp_path / "x.pth", **IMAGENET)


def test_every_layout_of_others_is_tested():
    tested = {layout for _, layout, _ in CHECKPOINTS.values()}
    elsewhere = {"kscl checkpoint", "dino (student)", "mae", "plain (model_state_dict)"}
    averages = {"plain (state_dict_ema)", "plain (model_ema)"}
    assert tested | elsewhere | averages == set(LAYOUTS)


@pytest.mark.parametrize("name", ASKED)
def test_an_input_that_is_not_imagenets_is_asked_for(networks, tmp_path, name):
    make = next(make for make, layout, _ in CHECKPOINTS.values() if layout == name)
    torch.save(make(*networks), tmp_path / "x.pth")
    with pytest.raises(KsclError, match=r"--mean .* --std"):
        load(tmp_path / "x.pth")
    with pytest.raises(KsclError, match="the std of its input must be given"):
        load(tmp_path / "x.pth", mean=(0, 0, 0))
    described = load(tmp_path / "x.pth", mean=(0, 0, 0), std=(1, 1, 1)).description
    assert (described.mean, described.std) == ((0, 0, 0), (1, 1, 1))


def test_swavs_own_standard_deviation_is_used(networks, tmp_path):
    torch.save(CHECKPOINTS["SwAV, released"][0](*networks), tmp_path / "x.pth")
    described = load(tmp_path / "x.pth").description
    assert (described.mean, described.std) == SWAV_INPUT
    assert described.std != IMAGENET["std"]


def test_the_student_of_dino_is_taken_if_it_is_chosen(networks, tmp_path):
    torch.save(dino(*networks), tmp_path / "x.pth")
    student = load(tmp_path / "x.pth", container="student")
    assert student.layout == "dino (student)"
    assert student.tensors_sha256 == hash_of("resnet18", NARROW, networks[1])
    assert any(name.startswith("[teacher]") for name in student.left_behind)


@pytest.mark.parametrize(("make", "layout"), [(mae, "mae"), (dino, "dino")])
def test_vision_transformers_of_mae_and_dino_load(tmp_path, make, layout):
    vits = states("vit_tiny_patch16_224", SMALL_VIT)
    torch.save(make(*vits), tmp_path / "x.pth")
    loaded = load(tmp_path / "x.pth", "vit_tiny_patch16_224", SMALL_VIT)
    assert loaded.layout == layout
    assert loaded.tensors_sha256 == hash_of("vit_tiny_patch16_224", SMALL_VIT, vits[0])
    assert loaded.description.mean == IMAGENET["mean"]


def test_the_input_of_a_plain_file_is_that_of_the_model_in_timm_and_it_is_said(tmp_path):
    (vit,) = states("vit_tiny_patch16_224", SMALL_VIT, count=1)
    torch.save(vit, tmp_path / "x.pth")
    loaded = load(tmp_path / "x.pth", "vit_tiny_patch16_224", SMALL_VIT)
    assert loaded.description.mean == loaded.description.std == (0.5,) * 3
    assert "--mean" in " ".join(loaded.said)
    told = load(tmp_path / "x.pth", "vit_tiny_patch16_224", SMALL_VIT, **IMAGENET)
    assert told.description.mean == IMAGENET["mean"]
    assert told.said == ()


def mae_encoder(vit: dict) -> dict:
    return {"model": vit}  # as MAE releases it: without the decoder


@pytest.mark.parametrize(
    ("content", "layout"),
    [(mae_encoder, "plain (model)"), (lambda vit: {"model_ema": vit}, "plain (model_ema)")],
)
def test_a_transformer_under_model_is_timms_or_maes_and_its_input_is_asked_for(
    tmp_path, content, layout
):
    (vit,) = states("vit_tiny_patch16_224", SMALL_VIT, count=1)
    torch.save(content(vit), tmp_path / "x.pth")
    words = tmp_path / "x.pth", "vit_tiny_patch16_224", SMALL_VIT
    with pytest.raises(KsclError, match=r"MAE and DeiT .*\(0\.5, .*--mean R G B --std R G B"):
        load(*words)
    loaded = load(*words, **IMAGENET)
    assert loaded.layout == layout
    assert loaded.description.mean == IMAGENET["mean"]
    deit = load(tmp_path / "x.pth", "deit_tiny_patch16_224", SMALL_VIT)  # timm knows its input
    assert (deit.description.mean, deit.said) == (IMAGENET["mean"], ())


@pytest.mark.parametrize("key", ["state_dict", "state_dict_ema"])
def test_a_transformer_that_timm_has_trained_has_the_input_of_timms(tmp_path, key):
    (vit,) = states("vit_tiny_patch16_224", SMALL_VIT, count=1)
    torch.save({"arch": "vit_tiny_patch16_224", key: vit}, tmp_path / "x.pth")
    loaded = load(tmp_path / "x.pth", "vit_tiny_patch16_224", SMALL_VIT)
    assert loaded.description.mean == (0.5,) * 3
    assert "--mean" in " ".join(loaded.said)


@pytest.mark.parametrize("keys", [("model", "model_ema"), ("state_dict", "state_dict_ema")])
def test_weights_and_their_average_are_refused_until_one_is_chosen(networks, tmp_path, keys):
    path, (plain, average) = tmp_path / "x.pth", networks
    averaged = under("module.", average) | {"n_averaged": torch.tensor(5)}
    torch.save({keys[0]: plain, keys[1]: averaged, "epoch": 3}, path)
    with pytest.raises(KsclError, match=rf"--container {keys[0]}(.|\n)*--container {keys[1]}"):
        load(path)
    for key, state in zip(keys, networks, strict=True):
        loaded = load(path, container=key)
        assert loaded.layout == f"plain ({key})"
        assert loaded.tensors_sha256 == hash_of("resnet18", NARROW, state)


def test_visslss_files_in_torchvisions_names_load(networks, tmp_path):
    torch.save({"model_state_dict": networks[0]}, tmp_path / "x.pth")
    assert load(tmp_path / "x.pth").layout == "plain (model_state_dict)"
