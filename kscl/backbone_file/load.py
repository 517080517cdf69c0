"""Load a backbone from a file, a name or a seed, and say what it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from kscl.backbone_file.file import IMAGENET_MEAN, IMAGENET_STD, Description, checksum
from kscl.backbone_file.find import Found, NotFound, find_tensors
from kscl.backbone_file.layouts import Input
from kscl.backbone_file.named import checked_hash, find_weights
from kscl.backbone_file.read import THREE_LINES, read_file, some, without_escapes
from kscl.config import plain
from kscl.errors import KsclError
from kscl.methods.encoder import STRIDE_IN_1X1, build_backbone

RANDOM = "random"
OUR_FILE = "kscl backbone"
OWN_LAYOUTS = (OUR_FILE, "kscl checkpoint")  # their files tell what they hold
TIMM_LAYOUTS = "plain"  # timm's and torchvision's files; timm knows the input of its models
OTHERS_TOO = ("plain (model)", "plain (model_ema)")  # MAE and DeiT save like this
SAME_COLOR = 1e-6  # files round
DINOV2_SWIGLU = (".mlp.w12.", ".mlp.fc1."), (".mlp.w3.", ".mlp.fc2.")  # in the giant model
MOST_DROPPED = 12  # names of dropped objects in a message
NAMED = "BACKBONE.NAME resnet50 (--arch resnet50 in kscl convert)"

Colors = dict[str, tuple[float, ...]]  # mean and std, as far as they are known


@dataclass(frozen=True)
class Loaded:
    """A backbone in eval mode, what it is, and where it came from."""

    backbone: nn.Module
    description: Description
    layout: str  # a name in LAYOUTS, OUR_FILE, RANDOM, or GIVEN
    path: Path | None  # the file that was read, a downloaded one in the cache; None if random
    file_sha256: str | None
    tensors_sha256: str
    left_behind: tuple[str, ...] = ()  # what the file holds beside the backbone
    messages: tuple[str, ...] = ()  # to print, e.g. which network was taken


def load_backbone(
    source: str | Path,
    arch: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    *,
    container: str | None = None,
    prefix: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    channels: str | None = None,
) -> Loaded:
    """Return a backbone from a file of ours or another project's, or random weights from a seed.

    `source` is a path, a name or address (kscl/backbone_file/named.py), which is downloaded once
    and cached, or `random`. Our own files say what they hold, and so do names. For others, `arch`
    names the timm model, unless the file does, as MoCo's do; `kwargs` are its arguments;
    `container` and `prefix` give the place in a file with several networks or an unknown layout;
    `mean` and `std` (RGB in [0, 1]) are the input of its pretraining where that is not known;
    `channels` (RGB or BGR) is the order in a file of Detectron2, if not known. The network returned
    is always for RGB. What the file and the user both say must agree.
    """
    given = _checked_input(mean, std)
    if str(source) == RANDOM:
        return _random_backbone(arch, kwargs, seed, given)
    name, weights = str(source), find_weights(source)
    assert weights is not None  # it may be downloaded
    path = weights.path
    if not path.is_file():
        raise KsclError(
            f"{name}: there is no such file of weights. Correct the path, name weights as in "
            f"timm:resnet50.a1_in1k, or say '{RANDOM}' for random ones."
        )
    file_sha256 = checked_hash(weights, name)
    content, described, dropped = read_file(path, name)
    if described is None and weights.description is not None:
        about = weights.description
        known = _arch_of({"arch": about.arch}, arch, name)
        description = replace(about, arch=known, kwargs={**about.kwargs, **(kwargs or {})})
    elif described is None:
        description = Description(_arch_of(content, arch, name), dict(kwargs or {}))
    elif arch is None or (arch, plain(dict(kwargs or {}))) == (described.arch, described.kwargs):
        description = described
    else:
        raise KsclError(
            f"{name} holds {described.arch} {described.kwargs}, not {arch} "
            f"{plain(dict(kwargs or {}))}. Name that network, or none."
        )
    backbone = build_backbone(description.arch, description.kwargs)
    try:
        content = _with_timm_names(content)
        found = find_tensors(content, backbone, name, container, prefix, channels)
    except NotFound as error:
        if not dropped:
            raise
        objects = f"Python objects in it ({some(dropped)}) were not read"
        raise KsclError(f"{error}\n  {objects}. {THREE_LINES}") from error
    _check_stride(found, description, name)
    messages = [sentence for sentence in (weights.message, found.message) if sentence]
    if described is not None or weights.description is not None:
        _check_agrees(description, given, name)
    else:
        description = _with_input(description, found, given, name)
        colors = (description.mean, description.std)
        is_timms = found.layout.startswith(TIMM_LAYOUTS) and not given
        if is_timms and colors != (IMAGENET_MEAN, IMAGENET_STD):
            messages.append(
                f"Its input is taken to be that of {description.arch} in timm: mean {colors[0]}, "
                f"std {colors[1]}; change it with --mean and --std."
            )
    if dropped:
        messages.append(f"Only tensors of the file were read, not {some(dropped, MOST_DROPPED)}.")
    backbone.load_state_dict(found.tensors, strict=True)
    is_ours = described is not None and path.suffix == ".safetensors"
    return Loaded(
        backbone.eval(),
        description,
        OUR_FILE if is_ours else found.layout,
        path,
        file_sha256,
        tensors_hash(backbone),
        found.left_behind,
        tuple(messages),
    )


def _arch_of(content: Mapping[str, Any], arch: str | None, name: str) -> str:
    """Return the timm model of another project's file: what the user names, or the file itself.

    MoCo, SimSiam, timm and PyTorch's ImageNet example save it as `arch`; others' names may not be
    timm's, such as MoCo v3's vit_small.
    """
    own = content.get("arch")
    says = without_escapes(own)[:60] if isinstance(own, str) else ""
    is_timms = bool(says) and timm.is_model(own)
    if arch is None:
        if is_timms:
            return str(own)
        called = f", which it calls '{says}'" if says else ""
        raise KsclError(
            f"{name} does not say which timm model it holds{called}. Name it, as in {NAMED}."
        )
    if is_timms and says.partition(".")[0] != arch.partition(".")[0]:  # without timm's tag
        raise KsclError(
            f"{name} says that it holds {says}, not {arch}. Name that network, or none. If the "
            "file is mistaken, save its state dict alone and give that file."
        )
    return arch


def _with_timm_names(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's content; if it has DINOv2's names, with timm's instead.

    In a model with registers, timm has no position embedding for the class token: it is added to
    the token.
    """
    renamed = dict(content)
    for key in [key for key in renamed if isinstance(key, str)]:
        for theirs, ours in DINOV2_SWIGLU:
            if theirs in key:
                renamed[key.replace(theirs, ours)] = renamed.pop(key)
    tokens: list[Any] = [
        renamed.get(name) for name in ("cls_token", "register_tokens", "pos_embed")
    ]
    if all(isinstance(value, Tensor) and value.ndim == 3 for value in tokens):
        token, registers, positions = tokens
        del renamed["register_tokens"]
        renamed |= {"cls_token": token + positions[:, :1], "reg_token": registers}
        renamed["pos_embed"] = positions[:, 1:]
    return renamed


def _check_stride(found: Found, description: Description, name: str) -> None:
    """Require that a file of Detectron2 and the arguments agree on the stride of the blocks."""
    known, given = found.stride_in_1x1, description.kwargs.get(STRIDE_IN_1X1)
    if found.has_stride and (given is None if known is None else bool(given) != known):
        expected = "false or true" if known is None else str(known).lower()
        raise KsclError(
            f"{name} ({found.layout}): {STRIDE_IN_1X1} must be {expected}, got {given}. It says "
            f"which convolution of a block has the stride (MODEL.RESNETS.STRIDE_IN_1X1 of its "
            f"Detectron2 config). Set --arch-kwargs '{{{STRIDE_IN_1X1}: …}}' (BACKBONE.KWARGS)."
        )


def _checked_input(mean: Sequence[float] | None, std: Sequence[float] | None) -> Colors:
    """Return what the user says about the input, by field."""
    given = {"mean": mean, "std": std}
    chosen = {key: tuple(value) for key, value in given.items() if value is not None}
    for key, value in chosen.items():
        if len(value) != 3 or not all(0 <= v <= 1 for v in value) or (key == "std" and 0 in value):
            raise KsclError(
                f"--{key} (INPUT.{key.upper()}) must be three numbers from 0 to 1 (red, green, "
                f"blue), got {value}."
            )
    return chosen


def _check_agrees(description: Description, given: Colors, name: str) -> None:
    """Raise an error if a file's own input is not the user's."""
    for key, value in given.items():
        known = getattr(description, key)
        if any(abs(a - b) > SAME_COLOR for a, b in zip(value, known, strict=True)):
            raise KsclError(
                f"{name} says that its {key} is {known}, not {value}. Leave out --{key} "
                f"(INPUT.{key.upper()}), or set it to that."
            )


def _with_input(description: Description, found: Found, given: Colors, name: str) -> Description:
    """Complete the description of another project's file by its input, known or given."""
    known: Colors = {}
    why_ask: Input = found.input
    own = timm.get_pretrained_cfg(description.arch)
    if found.layout.startswith(TIMM_LAYOUTS) and own is not None:
        is_imagenets = (own.mean, own.std) == (IMAGENET_MEAN, IMAGENET_STD)
        if is_imagenets or found.layout not in OTHERS_TOO:
            known = {"mean": own.mean, "std": own.std}
        else:
            why_ask = (
                f"MAE and DeiT save like this too and train on ImageNet's, but {description.arch} "
                f"in timm expects mean {own.mean} and std {own.std}"
            )
    elif isinstance(found.input, tuple):
        known = dict(zip(("mean", "std"), found.input, strict=True))
    known |= given
    missing = [key for key in ("mean", "std") if key not in known]
    if missing:
        raise KsclError(
            f"{name} (read as {found.layout}): the {' and '.join(missing)} of its input must be "
            f"given: {why_ask}. Say --mean R G B --std R G B (INPUT.MEAN and INPUT.STD of a "
            "probe): 0 0 0 and 1 1 1 for plain [0, 1], 0.485 0.456 0.406 and 0.229 0.224 0.225 for "
            "ImageNet's."
        )
    return replace(description, mean=known["mean"], std=known["std"])


def _random_backbone(
    arch: str | None, kwargs: Mapping[str, Any] | None, seed: int, given: Colors
) -> Loaded:
    if arch is None:
        raise KsclError(f"Random weights need the name of a timm model, as in {NAMED}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = build_backbone(arch, kwargs).eval()
    description = Description(arch, dict(kwargs or {}), source={"method": RANDOM, "seed": seed})
    description = replace(description, **given)  # type: ignore[arg-type]
    return Loaded(backbone, description, RANDOM, None, None, tensors_hash(backbone))


def tensors_hash(module: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers, by name, type, shape and bytes."""
    return checksum(module.state_dict())
