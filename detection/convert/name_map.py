"""What timm and Detectron2 call the same tensor of a ResNet; total, both ways."""

from __future__ import annotations

import re

from torch import Tensor

from detection.errors import DetectionError

COUNTER = (
    "num_batches_tracked"  # nothing is computed from it while BatchNorm's momentum is a number
)
NORM_TENSORS = ("weight", "bias", "running_mean", "running_var")
STEM_LAYERS = ("conv1", "conv1.norm")
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
# Where the built detectors have their ResNet: FPN, C4 (its res5 in the head), a trunk by itself.
MODEL_PREFIXES = ("backbone.bottom_up.", "backbone.", "roi_heads.", "")

_TIMM = re.compile(r"(?:layer(?P<stage>[1-4])\.(?P<block>\d+)\.)?(?P<layer>.+)\.(?P<tensor>\w+)")
_DETECTRON2 = re.compile(
    r"(?:stem|res(?P<stage>[2-5])\.(?P<block>\d+))\.(?P<layer>.+)\.(?P<tensor>\w+)"
)


def to_detectron2(name: str) -> str:
    """timm's name of a tensor in Detectron2's words; a name that is no such tensor is an error."""
    match = _TIMM.fullmatch(name)
    layer = LAYERS.get(match["layer"]) if match else None
    if match is None or layer is None or not _exists(match["stage"], layer, match["tensor"]):
        raise DetectionError(f"{name} is no tensor of a plain timm ResNet")
    place = f"res{int(match['stage']) + 1}.{match['block']}" if match["stage"] else "stem"
    return f"{place}.{layer}.{match['tensor']}"


def to_timm(name: str) -> str:
    """Detectron2's name of a tensor, without the model's prefix, in timm's words."""
    match = _DETECTRON2.fullmatch(name)
    if match is None or without_prefix(name) != name:
        raise DetectionError(f"{name} is no tensor of a Detectron2 ResNet")
    place = f"layer{int(match['stage']) - 1}.{match['block']}." if match["stage"] else ""
    return f"{place}{LAYERS_BACK[match['layer']]}.{match['tensor']}"


def rename(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """A timm backbone's tensors by Detectron2's names, and the names of the counters left out."""
    counters = [name for name in tensors if name.rpartition(".")[2] == COUNTER]
    carried = {
        to_detectron2(name): tensor.detach().cpu().contiguous()
        for name, tensor in tensors.items()
        if name not in counters
    }
    return carried, counters


def network_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a built model's tensors those of its ResNet, without the model's prefix."""
    return {bare: state[name] for name in state if (bare := without_prefix(name)) is not None}


def without_prefix(name: str) -> str | None:
    """A tensor's name inside the ResNet, or None if it belongs to another part of the model."""
    for prefix in MODEL_PREFIXES:
        bare = name.removeprefix(prefix)
        match = _DETECTRON2.fullmatch(bare)
        if match and name == prefix + bare and match["layer"] in LAYERS_BACK:
            return bare if _exists(match["stage"], match["layer"], match["tensor"]) else None
    return None


def _exists(stage: str | None, layer: str, tensor: str) -> bool:
    tensors = NORM_TENSORS if layer.endswith("norm") else ("weight",)
    return tensor in tensors and (stage is not None or layer in STEM_LAYERS)
