"""What timm and Detectron2 call the same tensor of a ResNet, in both directions."""

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
# Where a built detector has its timm network, whose tensors keep timm's names behind it: under an
# FPN, under a simple feature pyramid. A file of converted weights has the whole name.
TIMM_PREFIX = {"bottom_up": "backbone.bottom_up.network.", "net": "backbone.net.network."}

_TIMM = re.compile(r"(?:layer(?P<stage>[1-4])\.(?P<block>\d+)\.)?(?P<layer>.+)\.(?P<tensor>\w+)")
_DETECTRON2 = re.compile(
    r"(?:stem|res(?P<stage>[2-5])\.(?P<block>\d+))\.(?P<layer>.+)\.(?P<tensor>\w+)"
)


def to_detectron2(name: str) -> str:
    """Return Detectron2's name of a tensor of timm's; another name is an error."""
    match = _TIMM.fullmatch(name)
    layer = LAYERS.get(match["layer"]) if match else None
    if match is None or layer is None or not _exists(match["stage"], layer, match["tensor"]):
        raise DetectionError(f"{name} is not a tensor of a plain timm ResNet.")
    block = f"res{int(match['stage']) + 1}.{match['block']}" if match["stage"] else "stem"
    return f"{block}.{layer}.{match['tensor']}"


def to_timm(name: str) -> str:
    """Return timm's name of a tensor of Detectron2's, which is given without its prefix."""
    match = _DETECTRON2.fullmatch(name)
    if match is None or without_prefix(name) != name:
        raise DetectionError(f"{name} is not a tensor of a Detectron2 ResNet.")
    block = f"layer{int(match['stage']) - 1}.{match['block']}." if match["stage"] else ""
    return f"{block}{LAYERS_BACK[match['layer']]}.{match['tensor']}"


def rename(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return a timm backbone's tensors by Detectron2's names, and the counters left out."""
    counters = [name for name in tensors if name.rpartition(".")[2] == COUNTER]
    carried = {
        to_detectron2(name): tensor.detach().cpu().contiguous()
        for name, tensor in tensors.items()
        if name not in counters
    }
    return carried, counters


def network_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return those tensors of a built model that are its network's, by their names in a file."""
    return {bare: state[name] for name in state if (bare := without_prefix(name)) is not None}


def without_prefix(name: str) -> str | None:
    """Return a tensor's name in a file of weights, or None if it is not part of the network."""
    if name.startswith(tuple(TIMM_PREFIX.values())):
        return None if name.rpartition(".")[2] == COUNTER else name
    for prefix in MODEL_PREFIXES:
        bare = name.removeprefix(prefix)
        match = _DETECTRON2.fullmatch(bare)
        if match and name == prefix + bare and match["layer"] in LAYERS_BACK:
            return bare if _exists(match["stage"], match["layer"], match["tensor"]) else None
    return None


def _exists(stage: str | None, layer: str, tensor: str) -> bool:
    tensors = NORM_TENSORS if layer.endswith("norm") else ("weight",)
    return tensor in tensors and (stage is not None or layer in STEM_LAYERS)
