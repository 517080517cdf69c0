"""Feature levels of a timm network: which there are, their values, and what none of them needs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from detection.errors import DetectionError
from kscl.methods.encoder import build_backbone

STRIDES = {"res2": 4, "res3": 8, "res4": 16, "res5": 32}  # Detectron2's names of the levels
LAST = "last"  # the one level of a plain transformer
PLAIN_STRIDE = 16  # a simple feature pyramid makes strides 4 to 32 of it
# What makes a network take images of any size, tried in this order.
ANY_SIZE: tuple[dict[str, Any], ...] = ({}, {"dynamic_img_size": True}, {"strict_img_size": False})
PROBE_SIZE = (96, 160)  # neither is a usual size of pretraining, both are multiples of 32


@dataclass(frozen=True)
class Level:
    """One output of a network."""

    name: str
    index: int  # in timm's feature_info
    stride: int
    channels: int


def feature_info(network: nn.Module, name: str) -> list[dict[str, Any]]:
    """Return timm's description of a network's levels; a network without one is an error."""
    info = getattr(network, "feature_info", None)
    found = list(getattr(info, "info", info) or [])
    if not found or not all(entry.get("reduction") for entry in found):
        raise DetectionError(
            f"{name} has no feature_info, so timm does not say where its feature levels are, and "
            "no detector can be built on it. Choose a network with levels: "
            "timm.list_models(module=...) of resnet, regnet, convnext, efficientnet, "
            "swin_transformer or vision_transformer."
        )
    return found


def is_plain(network: nn.Module, name: str) -> bool:
    """Return whether all levels have one stride, as in a plain transformer."""
    return len({entry["reduction"] for entry in feature_info(network, name)}) == 1


def find_levels(network: nn.Module, name: str, wanted: Sequence[str]) -> list[Level]:
    """Return the levels of these names; a stride that the network does not have is an error."""
    info = feature_info(network, name)
    strides = [int(entry["reduction"]) for entry in info]
    levels = []
    for level in wanted:
        stride = PLAIN_STRIDE if level == LAST else STRIDES[level]
        if stride not in strides or (level == LAST and not is_plain(network, name)):
            raise DetectionError(
                f"{name} has feature levels of strides {', '.join(map(str, strides))}, and the "
                f"detector needs {stride} ({level}). Choose a network with strides 4, 8, 16 and "
                "32, or a plain transformer with patches of 16 pixels."
            )
        index = max(i for i, found in enumerate(strides) if found == stride)
        levels.append(Level(level, index, stride, int(info[index]["num_chs"])))
    return levels


def level_features(network: Any, images: Tensor, levels: Sequence[Level]) -> list[Tensor]:
    """Return the values of the levels as (B, C, H, W), before any final norm."""
    if hasattr(network, "forward_intermediates"):
        return network.forward_intermediates(
            images,
            indices=[level.index for level in levels],
            norm=False,
            stop_early=True,
            output_fmt="NCHW",
            intermediates_only=True,
        )
    with _outputs_of(network, levels) as outputs:
        network.forward_features(images)
    return [outputs[level.name] for level in levels]


@contextmanager
def _outputs_of(network: Any, levels: Sequence[Level]) -> Iterator[dict[str, Tensor]]:
    """Collect what the modules that feature_info names put out, for networks without a method."""
    info = feature_info(network, type(network).__name__)
    outputs: dict[str, Tensor] = {}

    def keep(name: str, _module: nn.Module, _input: Any, output: Tensor) -> None:
        outputs[name] = output.clone()  # the next layer may work in place

    handles = [
        network.get_submodule(info[level.index]["module"]).register_forward_hook(
            functools.partial(keep, level.name)
        )
        for level in levels
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def any_size_arguments(name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with which a network also takes images of other sizes than its own."""
    reason = ""
    for extra in ANY_SIZE:
        try:
            with torch.device("meta"), torch.no_grad():  # only shapes are computed
                network: Any = build_backbone(name, {**kwargs, **extra}).eval()
                network.forward_features(torch.zeros(1, 3, *PROBE_SIZE))
            return {**kwargs, **extra}
        except Exception as error:  # whatever a model does with a size that does not suit it
            reason = reason or f"{type(error).__name__}: {error}"
    raise DetectionError(
        f"{name} {dict(kwargs)} takes images of one size only ({reason}), and a detector's have "
        "many. Choose another network."
    )


def keep_only(network: Any, name: str, levels: Sequence[Level]) -> None:
    """Remove the layers that no level needs: parameters without gradient end a parallel run."""
    shapes = _shapes(network, name, levels)
    if hasattr(network, "prune_intermediate_layers"):
        indices = [level.index for level in levels]
        network.prune_intermediate_layers(indices, prune_norm=True, prune_head=True)
    used = set().union(*parameters_of(network, name, levels))
    _remove_unused(network, used)
    for key, parameter in network.named_parameters():
        if key not in used:  # of a module that has used ones too
            parameter.requires_grad_(False)
    if _shapes(network, name, levels) != shapes:
        raise DetectionError(f"{name} cannot be cut to its feature levels. Choose another network.")


@torch.enable_grad()
def parameters_of(network: nn.Module, name: str, levels: Sequence[Level]) -> list[set[str]]:
    """Return, for every level, the names of the parameters that its values depend on."""
    ghost = copy.deepcopy(network).to("meta").eval().requires_grad_(True)
    names, parameters = zip(*ghost.named_parameters(), strict=True)
    found = []
    for values in _probe(ghost, name, levels):
        gradients = torch.autograd.grad(
            values.sum(), parameters, allow_unused=True, retain_graph=True
        )
        found.append(
            {key for key, value in zip(names, gradients, strict=True) if value is not None}
        )
    return found


def _shapes(network: nn.Module, name: str, levels: Sequence[Level]) -> list[torch.Size]:
    ghost = copy.deepcopy(network).to("meta").eval()
    with torch.no_grad():
        found = [values.shape for values in _probe(ghost, name, levels)]
    for level, shape in zip(levels, found, strict=True):
        expected = (1, level.channels, *(side // level.stride for side in PROBE_SIZE))
        if tuple(shape) != expected:
            raise DetectionError(
                f"{name} gives {tuple(shape)} at {level.name} where its feature_info promises "
                f"{expected}, so no detector is built on it. Choose another network."
            )
    return found


def _probe(ghost: nn.Module, name: str, levels: Sequence[Level]) -> list[Tensor]:
    images = torch.zeros(1, 3, *PROBE_SIZE, device="meta")
    try:
        return level_features(ghost, images, levels)
    except Exception as error:  # whatever a model does with a size that does not suit it
        raise DetectionError(
            f"{name} gives no feature levels for images of {PROBE_SIZE[0]} x {PROBE_SIZE[1]} "
            f"({type(error).__name__}: {error}). Choose another network."
        ) from error


def _remove_unused(module: nn.Module, used: set[str], prefix: str = "") -> None:
    for name, child in module.named_children():
        parameters = [f"{prefix}{name}.{key}" for key, _ in child.named_parameters()]
        if parameters and not used.intersection(parameters):
            setattr(module, name, nn.Identity())
        elif parameters:
            _remove_unused(child, used, f"{prefix}{name}.")
