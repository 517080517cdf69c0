"""AdamW with layer-wise decay: every weight has the learning rate and decay of its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from detectron2.modeling import build_model
from torch import nn

from detection.backbones import TimmBackbone
from detection.config import load_detection_config
from detection.train.detector import build_on_meta
from detection.train.optimizer import build_optimizer
from detection.train.trials import check_trials
from kscl.errors import KsclError
from tests.helpers.networks.small import NETWORKS

PLAIN, PYRAMID = "build_timm_plain_backbone", "build_timm_fpn_backbone"
CONVNEXT, SWIN = "convnext_atto", "swin_tiny_patch4_window7_224"
VIT, DINO_V2, DINO_V3 = (
    *("vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2", "vit_small_patch16_dinov3"),
)
OF_VIT = {"patch_embed.": 3, "cls_token": 3, "pos_embed": 3, "reg_token": 3}
OF_VIT |= {"blocks.0.": 2, "blocks.1.": 1}
# How often LAYER_DECAY is applied, by how a weight's name begins.
TIMES: dict[str, dict[str, int]] = {
    VIT: OF_VIT,
    DINO_V2: OF_VIT,
    DINO_V3: OF_VIT,
    SWIN: {
        "patch_embed.": 6,
        "layers.0.": 5,
        "layers.1.downsample.": 4,
        "layers.1.blocks.0.": 4,
        "layers.1.blocks.1.": 3,
        "layers.2.": 2,
        "layers.3.": 1,
    },
    CONVNEXT: {
        "stem.": 6,
        "stages.0.": 5,
        "stages.1.downsample.": 4,
        "stages.1.blocks.0.": 4,
        "stages.1.blocks.1.": 3,
        "stages.2.": 2,
        "stages.3.": 1,
    },
}
TWO_BLOCKS: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2}
KWARGS = {
    **NETWORKS,
    CONVNEXT: {"depths": [1, 2, 1, 1], "dims": [8, 16, 32, 64]},
    DINO_V2: TWO_BLOCKS | {"dynamic_img_size": True, "dynamic_img_pad": True},
    DINO_V3: TWO_BLOCKS,
}
KWARGS[VIT] = {**NETWORKS[VIT], "dynamic_img_size": True}
KWARGS[SWIN] = {**NETWORKS[SWIN], "strict_img_size": False}
WITHOUT_DECAY = ("cls_token", "pos_embed", "reg_token", "relative_position_bias_table")


def config(name: str, *words: str) -> Any:
    family = name.partition("_")[0]
    cfg = load_detection_config(f"detection/shapes_tiny_{family}.yaml", words)
    cfg.MODEL.BACKBONE.NAME = PLAIN if family == "vit" else PYRAMID
    cfg.KSCL.TIMM.NAME, cfg.MODEL.DEVICE = name, "cpu"
    cfg.KSCL.TIMM.KWARGS.update(KWARGS[name])
    return cfg


@pytest.mark.parametrize("name", TIMES)
def test_every_weight_learns_at_the_rate_of_its_layer(name):
    words = ("KSCL.LAYER_DECAY", "0.5", "SOLVER.BASE_LR", "1.0", "SOLVER.WEIGHT_DECAY", "0.25")
    cfg = config(name, *words)
    model = build_on_meta(cfg)
    groups = build_optimizer(cfg, model).param_groups
    found = {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert sum(len(group["params"]) for group in groups) == len(found)
    seen = set()
    for key, weights in model.named_parameters():
        outside, inside, within = key.partition(".network.")
        times = 0
        if inside:
            (prefix,) = [prefix for prefix in TIMES[name] if within.startswith(prefix)]
            times = TIMES[name][prefix]
            seen.add(prefix)
        decays = weights.ndim > 1 and not key.endswith(WITHOUT_DECAY)
        assert found.pop(id(weights)) == (0.5**times, 0.25 if decays else 0.0), (outside, key)
    assert not found
    assert seen | {"pos_embed"} == set(TIMES[name]) | {"pos_embed"}  # DINOv3 has none


def test_the_gradients_of_all_weights_are_clipped_together():
    clip = "SOLVER.CLIP_GRADIENTS."
    words = [f"{clip}ENABLED", "True", f"{clip}CLIP_TYPE", "full_model", f"{clip}CLIP_VALUE", "0.5"]
    cfg = config(CONVNEXT, *words, f"{clip}NORM_TYPE", "2.0")
    weights = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2)})
    cfg.KSCL.LAYER_DECAY, cfg.KSCL.DROP_PATH = 1.0, 0.0
    optimizer = build_optimizer(cfg, weights)
    for parameter in weights.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    optimizer.step()
    norms = [parameter.grad.square().sum() for parameter in weights.parameters()]
    assert float(sum(norms)) == pytest.approx(0.25)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_drop_path_rises_over_the_blocks_and_leaves_a_frozen_network_alone(is_frozen):
    words = ("KSCL.DROP_PATH", "0.9", "MODEL.BACKBONE.FREEZE_AT", "5" if is_frozen else "0")
    model = build_model(config(VIT, *words)).train()
    (backbone,) = [module for module in model.modules() if isinstance(module, TimmBackbone)]
    found = [getattr(block.drop_path2, "drop_prob", 0.0) for block in backbone.network.blocks]
    assert found == pytest.approx([0.0, 0.9])
    assert {p.requires_grad for p in backbone.parameters()} == {not is_frozen}
    images = torch.randn(16, 3, 64, 64)
    one, other = (backbone(images)["last"] for _ in range(2))
    assert torch.equal(one, other) == is_frozen


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("densenet121", "KSCL.DROP_PATH", "0.1"), ("poolformer_s12", "KSCL.LAYER_DECAY", "0.9")],
)
def test_a_network_without_drop_path_or_without_numbered_layers_is_refused_by_key(name, key, value):
    words = ["KSCL.OPTIMIZER", "adamw", key, value, "MODEL.BACKBONE.NAME", PYRAMID]
    cfg = load_detection_config("detection/shapes_tiny_fpn.yaml", [*words, "MODEL.DEVICE", "cpu"])
    cfg.KSCL.TIMM.NAME = name
    with pytest.raises(KsclError, match=f"{key} .*{name}"):
        build_optimizer(cfg, build_on_meta(cfg))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("KSCL.LAYER_DECAY", "0.9"), "KSCL.OPTIMIZER adamw"),
        (("KSCL.OPTIMIZER", "adamw", "SOLVER.MOMENTUM", "0.8"), "SOLVER.MOMENTUM"),
        (("SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "all"), "full_model"),
    ],
)
def test_settings_that_do_not_fit_the_optimizer_are_refused_by_key(words, named):
    with pytest.raises(KsclError, match=named):
        load_detection_config("detection/shapes_tiny_fpn.yaml", words)


def test_a_protocol_for_a_timm_network_is_checked_before_the_network_is_there(tmp_path):
    cfg = load_detection_config("detection/shapes_tiny_vit.yaml", ["OUTPUT_DIR", str(tmp_path)])
    sets = [*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST]
    assert check_trials(cfg, ["MODEL.WEIGHTS", *sets]) == []
    cfg.KSCL.FROM_SCRATCH = True  # the ResNet of the protocol
    (problem,) = check_trials(cfg, sets)
    assert "KSCL.LAYER_DECAY and KSCL.DROP_PATH" in problem.what
