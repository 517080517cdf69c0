"""ResNets in Detectron2's files, by its own names of tensors or by those of the Caffe2 models.

The tensors alone do not show the order of the color channels, the mean and std of the input, or
which convolution of a block has the stride. For files of known converters all of it is known; for
any other file the user must say it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kscl.backbone_file.file import IMAGENET_MEAN
from kscl.backbone_file.layouts import IMAGENET, Color, Container
from kscl.errors import KsclError

State = dict[str, Tensor]
COUNTER = "num_batches_tracked"
WRAPPERS = ("module", "_orig_mod")
AUTHOR = "kscl"  # in files of kscl convert
RGB, BGR = "RGB", "BGR"
DETECTRON2, CAFFE2 = "detectron2", "caffe2"

# A tensor of Detectron2's ResNet, behind the prefix of a built detector: FPN, C4 (its res5 is in
# the head), or none.
_NAME = re.compile(
    r"(?:backbone\.(?:bottom_up\.)?|roi_heads\.)?"
    r"(?P<bare>(?:stem(?=\.conv1\.)|res(?P<stage>[2-5])\.(?P<block>\d+))"
    r"\.(?P<conv>conv[123]|shortcut)\.(?:weight|norm\.(?P<norm>"
    rf"weight|bias|running_mean|running_var|{COUNTER})))"
)
# detectron2/checkpoint/c2_model_loading.py has the same translation.
_CAFFE2_NAME = re.compile(
    r"(?:res(?P<stage>[2-5])_(?P<block>\d+)_(?P<branch>branch1|branch2[abc])|(?:res_)?conv1)"
    r"_(?:w|[bg]n_(?P<norm>\w+))"
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
    "riv": "running_var",
}


@dataclass(frozen=True)
class Convention:
    """What a file's tensors do not show."""

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
    content: Mapping[str, Any], dicts: Mapping[Container, State], name: str
) -> Trunk | None:
    """Return the ResNet in a file's content, or None if it is not in Detectron2's layout."""
    author = str(content.get("__author__", ""))
    if author == AUTHOR:
        raise KsclError(
            f"{name} is a converted file and needs no conversion. Train from the config.yaml "
            "beside it. For another detector convert its source again; for timm convert the folder "
            "back: kscl convert FOLDER --to timm --output-dir BACK."
        )
    needed = {"conv1.weight", "layer1.0.conv1.weight"}
    for where, tensors in dicts.items():
        if needed <= set(names := _names(tensors, timm_name, name)):
            return Trunk(where, names, DETECTRON2, author, CONVENTIONS.get(author))
        if needed <= set(names := _names(tensors, _timm_name_of_caffe2, name)):
            known = CONVENTIONS.get(author) if author else _caffe2_convention(tensors, names)
            return Trunk(where, names, CAFFE2, author or ("MSRA" if known else ""), known)
    return None


def _names(tensors: State, translate: Callable[[str], str | None], name: str) -> dict[str, str]:
    names: dict[str, str] = {}
    for key, tensor in tensors.items():
        ours = translate(unwrapped(key))
        if ours is not None and not torch.equal(tensors[names.setdefault(ours, key)], tensor):
            raise KsclError(
                f"{name} holds two ResNets with different values ({names[ours]} and {key}). Save "
                "the one to take as a file of its own."
            )
    return names


def _caffe2_convention(tensors: State, names: dict[str, str]) -> Convention | None:
    """Return MSRA's convention for plain ResNets: ResNeXts and GroupNorm are FAIR's, and vary."""
    middle = tensors[names.get("layer1.0.conv2.weight", names["conv1.weight"])]
    plain = middle.ndim == 4 and middle.shape[0] == middle.shape[1]  # not grouped
    return MSRA if plain and "bn1.running_mean" in names else None


def unwrapped(key: str) -> str:
    """Return a name without the wrappers of DDP and torch.compile."""
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)


def bare_name(name: str) -> str | None:
    """Return a tensor's name without a detector's prefix; None if it is not a ResNet's weight."""
    match = _NAME.fullmatch(name)
    return match["bare"] if match and match["norm"] != COUNTER else None


def timm_name(name: str) -> str | None:
    """Return timm's name of a tensor of Detectron2's; None if it is not part of a ResNet."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    inside = f"layer{int(match['stage']) - 1}.{match['block']}." if match["stage"] else ""
    if match["conv"] == "shortcut":
        layer = "downsample.1" if match["norm"] else "downsample.0"
    else:
        layer = match["conv"].replace("conv", "bn") if match["norm"] else match["conv"]
    return f"{inside}{layer}.{match['norm'] or 'weight'}"


def detectron2_name(name: str) -> str | None:
    """Return Detectron2's name of a tensor of timm's; None if a plain ResNet has none."""
    stage = re.match(r"layer(\d)\.", name)
    new = f"res{int(stage[1]) + 1}.{name[stage.end() :]}" if stage else f"stem.{name}"
    new = new.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
    new = re.sub(r"\bbn([123])\b", r"conv\1.norm", new)
    return new if bare_name(new) == new and timm_name(new) == name else None


def _timm_name_of_caffe2(name: str) -> str | None:
    match = _CAFFE2_NAME.fullmatch(name)
    if match is None:
        return None
    place = f"res{match['stage']}.{match['block']}" if match["stage"] else "stem"
    norm = match["norm"] and f"norm.{_CAFFE2_NORMS.get(match['norm'], match['norm'])}"
    return timm_name(f"{place}.{_CAFFE2_LAYERS[match['branch']]}.{norm or 'weight'}")


def layout_of(kind: str, channels: str) -> str:
    """Return how a certificate names the layout of a file of Detectron2."""
    return f"{kind}, {channels}"


def channels_of(layout: str) -> str | None:
    """Return the channel order in such a name; None for any other layout."""
    kind, _, channels = layout.partition(", ")
    return channels if kind in (DETECTRON2, CAFFE2) else None
