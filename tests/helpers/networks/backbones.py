"""Backbones for tests: random, but with norms that a wrong conversion cannot hide behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kscl.backbone_file import Description, save_backbone
from kscl.backbone_file.detectron2 import detectron2_name
from kscl.methods.encoder import build_backbone

NARROW: dict[str, Any] = {"channels": [8, 16, 32, 64]}


def lively_backbone(
    arch: str = "resnet50", kwargs: dict[str, Any] | None = None, seed: int = 0
) -> nn.Module:
    """Untrained norms are the identity; here each channel has a scale, shift, mean and variance."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = build_backbone(arch, kwargs)
        for module in backbone.modules():
            if isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, 0, 0.2)
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.running_mean, 0, 0.2)
                nn.init.uniform_(module.running_var, 0.5, 2)
    return backbone.eval()


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A timm ResNet's tensors by Detectron2's names."""
    return {name: value for key, value in state.items() if (name := detectron2_name(key))}


def backbone_file(
    folder: Path, arch: str = "resnet50", kwargs: dict[str, Any] | None = None, seed: int = 0
) -> Path:
    """A backbone file of ours."""
    path = folder / f"{arch}_{seed}.safetensors"
    backbone = lively_backbone(arch, kwargs, seed)
    run = {"method": "kscl", "epochs": 2, "seed": seed}
    save_backbone(path, backbone.state_dict(), Description(arch, kwargs or {}, source=run))
    return path
