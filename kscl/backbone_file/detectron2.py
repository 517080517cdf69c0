"""ResNets in Detectron2's files, by its own names of tensors or by those of the Caffe2 models.

The tensors alone do not tell the order of the color channels, the mean and std of the input, or
which convolution of a block has the stride. For files of known converters all of it is known; for
any other file the user must say it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kscl.backbone_file.describe import IMAGENET_MEAN
from kscl.backbone_file.layouts import IMAGENET, Color, Container
from kscl.backbone_file.places import COUNTER, State, unwrapped
from kscl.errors import KsclError

# A layer's name inside the stem or a block; layer1 … layer4 are res2 … res5.
LAYERS = {  # timm: Detectron2
    "conv1": "conv1",
    "bn1": "conv1.norm",
    "conv2": "conv2",
    "bn2": "conv2.norm",
    "conv3": "conv3",
    "bn3": "conv3.norm",
    "downsample.0": "shortcut",
    "downsample.1": "shortcut.norm",
}
LAYERS_BACK = {theirs: ours for ours, theirs in LAYERS.items()}
NORM_TENSORS = ("weight", "bias", "running_mean", "running_var")
STEM_LAYERS = ("conv1", "conv1.norm")
# Where the built detectors have their ResNet: FPN, C4 (its res5 in the head), a trunk by itself.
MODEL_PREFIXES = ("backbone.bottom_up.", "backbone.", "roi_heads.", "")
DETECTRON2_NAME = re.compile(
    r"(?:stem|res(?P<stage>[2-5])\.(?P<block>\d+))\.(?P<layer>.+)\.(?P<tensor>\w+)"
)
# detectron2/checkpoint/c2_model_loading.py has the same translation.
_CAFFE2_NAME = re.compile(
    r"(?:res(?P<stage>[2-5])_(?P<block>\d+)_(?P<branch>branch1|branch2[abc])|(?:res_)?conv1)"
    r"_(?P<tensor>w|[bg]n_\w+)"
)
_CAFFE2_LAYERS = {
    None: "conv1",
    "branch1": "shortcut",
    "branch2a": "conv1",
    "branch2b": "conv2",
    "branch2c": "conv3",
}
_CAFFE2_NORMS = {
    "s": "weight",
    "gamma": "weight",
    "b": "bias",
    "beta": "bias",
    "rm": "running_mean",
    "running_mean": "running_mean",
    "riv": "running_var",
    "running_var": "running_var",
}
AUTHOR = "kscl"  # in files of tools/convert.py
RGB, BGR = "RGB", "BGR"
DETECTRON2, CAFFE2 = "detectron2", "caffe2"


@dataclass(frozen=True)
class Convention:
    """What a file's tensors do not tell."""

    channels: str  # RGB or BGR
    input: tuple[Color, Color]  # mean and std, RGB in [0, 1]
    stride_in_1x1: bool


TORCHVISION = Convention(RGB, IMAGENET, stride_in_1x1=False)
# Pixels from 0 to 255 minus the mean, not divided (detectron2/config/defaults.py).
MSRA = Convention(BGR, (IMAGENET_MEAN, (1 / 255,) * 3), stride_in_1x1=True)
CONVENTIONS = {  # by the `__author__` that a converter writes
    "torchvision": TORCHVISION,  # facebookresearch/detectron2: tools/convert-torchvision-to-d2.py
    "MOCO": TORCHVISION,  # facebookresearch/moco: detection/convert-pretrain-to-detectron2.py
    # open-mmlab/OpenSelfSup, WXinlong/DenseCL: benchmarks/detection/convert-pretrain-to-…
    "OpenSelfSup": TORCHVISION,
}


@dataclass(frozen=True)
class Trunk:
    """The ResNet in a file of Detectron2."""

    container: Container
    names: dict[str, str]  # timm's name: the file's, inside the container
    kind: str  # DETECTRON2 or CAFFE2: whose names they are
    author: str
    convention: Convention | None  # None: not known


def find_trunk(
    content: Mapping[str, Any], dicts: dict[Container, State], name: str
) -> Trunk | None:
    """Return the ResNet in a file's content, or None if it is not in Detectron2's layout."""
    author = str(content.get("__author__", ""))
    if author == AUTHOR:
        raise KsclError(
            f"{name} is a converted file, so it needs no conversion: train from the config.yaml "
            "beside it. For another detector convert its source again; for timm take the folder "
            "back: tools/convert.py FOLDER --to timm --output-dir BACK."
        )
    needed = {"conv1.weight", "layer1.0.conv1.weight"}
    for where, tensors in dicts.items():
        if needed <= set(names := _names(tensors, timm_name, name)):
            return Trunk(where, names, DETECTRON2, author, CONVENTIONS.get(author))
        if needed <= set(names := _names(tensors, _timm_name_of_caffe2, name)):
            known = CONVENTIONS.get(author) if author else _of_caffe2(tensors, names)
            return Trunk(where, names, CAFFE2, author or ("MSRA" if known else ""), known)
    return None


def _names(tensors: State, translate: Callable[[str], str | None], name: str) -> dict[str, str]:
    names: dict[str, str] = {}
    for key, tensor in tensors.items():
        ours = translate(unwrapped(key))
        if ours is not None and not torch.equal(tensors[names.setdefault(ours, key)], tensor):
            raise KsclError(
                f"{name} holds two ResNets with different values ({names[ours]} and {key}): save "
                "the one to take as a file of its own."
            )
    return names


def _of_caffe2(tensors: State, names: dict[str, str]) -> Convention | None:
    """Return MSRA's convention for plain ResNets: ResNeXts and GroupNorm are FAIR's, and vary."""
    middle = tensors[names.get("layer1.0.conv2.weight", names["conv1.weight"])]
    plain = middle.ndim == 4 and middle.shape[0] == middle.shape[1]  # not grouped
    return MSRA if plain and "bn1.running_mean" in names else None


def timm_name(name: str) -> str | None:
    """Return timm's name of a tensor of Detectron2's; None if it is not part of a ResNet."""
    for prefix in MODEL_PREFIXES:
        bare = name.removeprefix(prefix)
        match = DETECTRON2_NAME.fullmatch(bare)
        if match and name == prefix + bare and match["layer"] in LAYERS_BACK:
            return _timm_name(match["stage"], match["block"], match["layer"], match["tensor"])
    return None


def _timm_name_of_caffe2(name: str) -> str | None:
    match = _CAFFE2_NAME.fullmatch(name)
    if match is None:
        return None
    layer, tensor = _CAFFE2_LAYERS[match["branch"]], "weight"
    if match["tensor"] != "w":
        layer, tensor = f"{layer}.norm", _CAFFE2_NORMS.get(match["tensor"][3:], "")
    return _timm_name(match["stage"], match["block"], layer, tensor)


def _timm_name(stage: str | None, block: str, layer: str, tensor: str) -> str | None:
    if not exists(stage, layer, tensor) and not (layer.endswith("norm") and tensor == COUNTER):
        return None
    inside = f"layer{int(stage) - 1}.{block}." if stage else ""
    return f"{inside}{LAYERS_BACK[layer]}.{tensor}"


def exists(stage: str | None, layer: str, tensor: str) -> bool:
    """Return whether Detectron2's ResNet has this tensor, counters aside; no stage: its stem."""
    tensors = NORM_TENSORS if layer.endswith("norm") else ("weight",)
    return tensor in tensors and (stage is not None or layer in STEM_LAYERS)


def layout_of(kind: str, channels: str) -> str:
    """Return how a certificate names the layout of a file of Detectron2."""
    return f"{kind}, {channels}"


def channels_of(layout: str) -> str | None:
    """Return the channel order in such a name; None for any other layout."""
    return next(
        (c for c in (RGB, BGR) if layout in (layout_of(DETECTRON2, c), layout_of(CAFFE2, c))), None
    )
