"""Small timm networks of every route into a detector, and one step of pretraining for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kscl.commands.pretrain import main as pretrain
from tests.helpers.runs import TINY, draw_images

# name: arguments that make it small
NETWORKS: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "resnetblur50": {"channels": [8, 16, 32, 64]},
    "regnetx_002": {},
    "convnext_atto": {"depths": [1, 1, 1, 1], "dims": [8, 16, 32, 64]},
    "efficientnet_lite0": {},
    "swin_tiny_patch4_window7_224": {
        "img_size": 64,
        "window_size": 4,
        "embed_dim": 16,
        "depths": [1, 2, 1, 1],
        "num_heads": [1, 2, 4, 8],
    },
    "vit_tiny_patch16_224": {
        "img_size": 64,
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 2,
        "reg_tokens": 2,
        "init_values": 0.1,
    },
}


def pretrained_step(folder: Path, name: str) -> Path:
    """Pretrain one of the networks for one step; return its backbone file."""
    images = draw_images(folder / "images", count=4)
    about = yaml.safe_load(TINY)
    about["BACKBONE"] = {"NAME": name, "KWARGS": NETWORKS[name]}
    about["INPUT"] = {"SIZE": 64}
    about["DICTIONARY"] = {"QUEUE_LENGTH": 4}
    about["SOLVER"] |= {"EPOCHS": 1, "BATCH_SIZE": 4}
    (folder / "pretrain.yaml").write_text(yaml.safe_dump(about))
    words = ["--config-file", str(folder / "pretrain.yaml"), "OUTPUT_DIR", str(folder / "run")]
    assert pretrain([*words, "DATA.TRAIN", str(images)]) == 0
    return folder / "run" / "backbone.safetensors"
