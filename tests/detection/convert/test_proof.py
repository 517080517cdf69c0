"""Wrong conversions that names and shapes do not show are caught, and at the right stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from detection.config import load_detection_config, set_network
from detection.convert.architecture import examine
from detection.convert.converter import weights_bytes
from detection.convert.name_map import rename
from detection.convert.proof import STAGES, TOLERANCE, check_proof, stage_differences, usual_cause
from detection.errors import DetectionError
from kscl.backbone_file import IMAGENET_MEAN, IMAGENET_STD
from tests.helpers.networks.backbones import NARROW, lively_backbone

BGR_MEAN, BGR_STD = "[103.53, 116.28, 123.675]", "[57.375, 57.12, 58.395]"


@pytest.fixture(scope="module")
def backbone() -> nn.Module:
    return lively_backbone("resnet50", NARROW)


@pytest.fixture(scope="module")
def weights(backbone, tmp_path_factory):
    return write(backbone, tmp_path_factory.mktemp("weights"))


def write(backbone, folder):
    path = folder / "weights.pth"
    path.write_bytes(weights_bytes(rename(backbone.state_dict())[0], "pth"))
    return path


def differences(backbone, weights, *overrides) -> dict[str, float]:
    """Of a Detectron2 model with these keys set wrongly."""
    cfg = load_detection_config("detection/voc0712_c4_24k_moco.yaml")
    set_network(cfg, examine(lively_backbone("resnet50", NARROW), "").detectron2_keys())
    cfg.merge_from_list(list(overrides))
    return stage_differences(backbone, NARROW, IMAGENET_MEAN, IMAGENET_STD, cfg, weights)


def first_failure(found: dict[str, float]) -> str:
    return next(stage for stage in STAGES if not found[stage] <= TOLERANCE)


def test_a_right_conversion_passes_at_every_stage(backbone, weights):
    found = differences(backbone, weights)
    assert max(found.values()) < 1e-5
    check_proof(found)


@pytest.mark.parametrize(
    ("overrides", "stage", "cause"),
    [
        (("MODEL.RESNETS.STRIDE_IN_1X1", "True"), "res3", "STRIDE_IN_1X1"),
        (("MODEL.RESNETS.RES5_DILATION", "2"), "res5", "dilation"),
        (("INPUT.FORMAT", "BGR"), "stem", "channel order"),
        (
            (
                *("INPUT.FORMAT", "BGR"),
                *("MODEL.PIXEL_MEAN", BGR_MEAN, "MODEL.PIXEL_STD", BGR_STD),
            ),
            "stem",
            "channel order",
        ),
        (("MODEL.PIXEL_MEAN", BGR_MEAN), "stem", "PIXEL_MEAN"),
        (("MODEL.PIXEL_STD", "[1.0, 1.0, 1.0]"), "stem", "PIXEL_STD"),
    ],
)
def test_a_wrong_config_fails_first_where_it_is_wrong(overrides, stage, cause, backbone, weights):
    found = differences(backbone, weights, *overrides)
    assert first_failure(found) == stage
    assert all(found[s] < 1e-5 for s in STAGES[: STAGES.index(stage)])
    with pytest.raises(DetectionError, match=f"differs first at {stage}") as caught:
        check_proof(found)
    assert cause in str(caught.value)


@pytest.mark.parametrize("place", ["everywhere", "layer3"])
def test_another_eps_fails_and_is_taken_for_what_it_is(place, weights):
    changed = lively_backbone("resnet50", NARROW)
    part = changed if place == "everywhere" else changed.layer3
    for module in part.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    found = differences(changed, weights)
    stage = {"everywhere": "stem", "layer3": "res4"}[place]
    assert first_failure(found) == stage
    assert "eps" in usual_cause(stage, found[stage])


@pytest.mark.parametrize(
    ("name", "kwargs", "stage"),
    [
        ("resnetblur50", {}, "stem"),
        ("resnet50", {"output_stride": 16}, "res5"),
        ("resnet50", {"act_layer": "leaky_relu"}, "stem"),
    ],
)
def test_networks_with_the_same_tensors_that_compute_something_else_fail(
    name, kwargs, stage, backbone, weights
):
    other = lively_backbone(name, {**NARROW, **kwargs})
    other.load_state_dict(backbone.state_dict())
    assert first_failure(differences(other, weights)) == stage


def test_branches_that_start_at_zero_do_not_hide_a_wrong_stride(tmp_path):
    hidden = lively_backbone("resnet50", NARROW)
    for module in hidden.modules():
        if hasattr(module, "zero_init_last"):
            module.zero_init_last()
    path = write(hidden, tmp_path)
    assert max(differences(hidden, path).values()) < 1e-5
    wrong = differences(hidden, path, "MODEL.RESNETS.STRIDE_IN_1X1", "True")
    assert first_failure(wrong) == "res3"
    assert not hidden.layer1[0].bn3.weight.any()  # the source is left as it was


def test_a_dead_network_proves_nothing(tmp_path):
    dead = lively_backbone("resnet50", NARROW)
    dead.bn1.weight.data.fill_(-1e-3)
    dead.bn1.bias.data.fill_(-1e3)
    with pytest.raises(DetectionError, match="only zeros at stem"):
        differences(dead, write(dead, tmp_path))


def test_a_difference_that_is_no_number_is_a_failure():
    with pytest.raises(DetectionError, match="differs first at res2"):
        check_proof({"stem": 0.0, "res2": float("nan")})


def test_the_proof_leaves_the_global_random_state_alone(backbone, weights):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    differences(backbone, weights)
    assert torch.rand(1) == expected
