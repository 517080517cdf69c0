"""Checkpoints of other projects through the converter, as its users call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from detection.commands.convert import main
from detection.convert.weights import read_weights
from kscl.backbone_file import LAYOUTS
from tests.helpers.networks.backbones import lively_backbone
from tests.helpers.networks.checkpoints import CHECKPOINTS, dino, mae, some, under
from tests.helpers.networks.small import NETWORKS

pytestmark = pytest.mark.full

NETWORK = ("--arch", "resnet18", "--protocol", "detection/shapes_tiny_fpn.yaml")
PLAIN_INPUT = ("--mean", "0", "0", "0", "--std", "1", "1", "1")
QUICK = ("MoCo v1 and v2", "SimCLR of sthalles", "DINO", "VISSL")


@pytest.fixture(scope="module")
def networks() -> list[dict]:
    """Two networks: the one that a project's evaluation uses, and the other one."""
    return [lively_backbone("resnet18", seed=seed).state_dict() for seed in (1, 2)]


def assert_holds(folder: Path, state: dict) -> None:
    found = read_weights(folder / "weights.pth")
    for theirs, ours in (
        ("stem.conv1.weight", "conv1.weight"),
        ("res3.0.shortcut.norm.running_var", "layer2.0.downsample.1.running_var"),
        ("res5.1.conv2.weight", "layer4.1.conv2.weight"),
    ):
        assert torch.equal(found[theirs], state[ours])


@pytest.mark.parametrize(
    "project",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CHECKPOINTS],
)
def test_a_projects_checkpoint_is_converted_and_what_was_taken_is_told(
    project, networks, tmp_path, capsys
):
    make, layout, second = CHECKPOINTS[project]
    torch.save(make(*networks), tmp_path / "x.pth")
    words = [str(tmp_path / "x.pth"), *NETWORK, "--output-dir", str(tmp_path / "out")]
    if LAYOUTS[layout].input is None:  # its project does not share ImageNet's
        assert main(words) == 2
        assert "--mean" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
        words += PLAIN_INPUT
    assert main(words) == 0
    told = capsys.readouterr().out
    assert f"x.pth ({layout}): resnet18" in told
    assert ("Took " in told) == second
    assert_holds(tmp_path / "out", networks[0])
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert certificate["source"]["layout"] == layout


def test_of_two_networks_one_must_be_chosen(networks, tmp_path, capsys):
    plain, average = networks
    torch.save({"model": plain, "model_ema": under("module.", average)}, tmp_path / "x.pth")
    words = [str(tmp_path / "x.pth"), *NETWORK, "--output-dir", str(tmp_path / "out")]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "--container model\n" in told or "--container model " in told
    assert "--container model_ema" in told
    assert not (tmp_path / "out").exists()
    assert main([*words, "--container", "model_ema"]) == 0
    assert_holds(tmp_path / "out", average)


class RunsCode:
    """What opens a file for writing when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_code_in_a_checkpoint_does_not_run(networks, tmp_path, capsys):
    beside = {"state_dict": networks[0], "args": RunsCode(tmp_path / "ran")}
    torch.save(beside, tmp_path / "beside.pth")
    torch.save({"state_dict": RunsCode(tmp_path / "ran")}, tmp_path / "instead.pth")
    words = [*NETWORK, "--output-dir", str(tmp_path / "out")]
    assert main([str(tmp_path / "instead.pth"), *words]) == 2
    told = capsys.readouterr().err
    assert "instead.pth" in told
    assert "weights_only" not in told
    assert "\x1b" not in told
    assert main([str(tmp_path / "beside.pth"), *words]) == 0
    assert_holds(tmp_path / "out", networks[0])
    assert not (tmp_path / "ran").exists()


def test_a_converted_file_needs_no_conversion(tmp_path, capsys):
    assert main(["random", *NETWORK, "--output-dir", str(tmp_path / "out")]) == 0
    weights = str(tmp_path / "out" / "weights.pth")
    assert main([weights, *NETWORK, "--output-dir", str(tmp_path / "again")]) == 2
    assert "needs no conversion" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_any_other_layout_is_named_by_container_and_prefix(networks, tmp_path, capsys):
    tensors = under("net.trunk.", networks[0]) | under("net.twin.", networks[1])
    torch.save({"run": {"weights": tensors | some("net.head.weight")}}, tmp_path / "x.pth")
    words = [str(tmp_path / "x.pth"), *NETWORK, "--output-dir", str(tmp_path / "out")]
    assert main(words) == 2
    assert "--container run.weights --prefix 'net.trunk.'" in capsys.readouterr().err
    words += ["--container", "run.weights", "--prefix", "net.trunk."]
    assert main(words) == 2
    assert "--mean" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*words, *PLAIN_INPUT]) == 0
    assert_holds(tmp_path / "out", networks[0])
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_text())
    left = {name for name in certificate["left_behind"] if name.startswith("net.")}
    assert left == {*under("net.twin.", networks[1]), "net.head.weight"}


def test_the_student_of_dino_is_taken_if_it_is_chosen(networks, tmp_path, capsys):
    torch.save(dino(*networks), tmp_path / "x.pth")
    words = [str(tmp_path / "x.pth"), *NETWORK, "--output-dir", str(tmp_path / "out")]
    assert main([*words, "--container", "student"]) == 0
    assert "x.pth (dino (student)): resnet18" in capsys.readouterr().out
    assert_holds(tmp_path / "out", networks[1])


@pytest.mark.parametrize(("make", "layout"), [(mae, "mae"), (dino, "dino")])
def test_vision_transformers_of_mae_and_dino_are_converted(make, layout, tmp_path, capsys):
    name = "vit_tiny_patch16_224"
    states = [lively_backbone(name, NETWORKS[name], seed=seed).state_dict() for seed in (1, 2)]
    torch.save(make(*states), tmp_path / "x.pth")
    words = [str(tmp_path / "x.pth"), "--arch", name, "--arch-kwargs", str(NETWORKS[name])]
    assert main([*words, *NETWORK[2:], "--output-dir", str(tmp_path / "out")]) == 0
    assert f"x.pth ({layout}): {name}" in capsys.readouterr().out
    found = read_weights(tmp_path / "out" / "weights.pth")
    taken = [value for key, value in found.items() if key.endswith("blocks.1.mlp.fc2.weight")]
    assert len(taken) == 1
    assert torch.equal(taken[0], states[0]["blocks.1.mlp.fc2.weight"])


def test_a_pickled_network_is_refused_with_the_lines_that_save_its_weights(tmp_path, capsys):
    torch.save({"model": lively_backbone("resnet18", seed=1)}, tmp_path / "x.pth")
    words = [str(tmp_path / "x.pth"), *NETWORK, "--output-dir", str(tmp_path / "out")]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "torch.save(model.state_dict()" in told
    assert "weights_only=False" not in told
    assert "\x1b" not in told
    assert not (tmp_path / "out").exists()
