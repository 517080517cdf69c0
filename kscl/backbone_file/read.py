"""Read a backbone from a file, an address or a seed; nothing but tensors is ever loaded."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import timm
import torch
from torch import nn

from kscl.backbone_file.describe import (
    DESCRIPTION,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Description,
    check_description,
    parse_description,
)
from kscl.backbone_file.find import Found, find_tensors
from kscl.backbone_file.refuse import NotFound, some
from kscl.backbone_file.unpickle import (
    THREE_LINES,
    first_line,
    read_arrays_pickle,
    read_tensors,
    without_escapes,
)
from kscl.backbone_file.write import CHECKSUM, checksum
from kscl.data.source import cache_folder
from kscl.errors import KsclError
from kscl.methods.encoder import STRIDE_IN_1X1, build_backbone
from kscl.runtime.files import sha256_of
from kscl.runtime.paths import local_path

RANDOM = "random"
OUR_FILE = "kscl backbone"
OWN_LAYOUTS = (OUR_FILE, "kscl checkpoint")  # their files tell what they hold
TIMM_LAYOUTS = "plain"  # timm's and torchvision's files; timm knows the input of its models
OTHERS_TOO = ("plain (model)", "plain (model_ema)")  # MAE and DeiT save like this
SAME_COLOR = 1e-6  # files round
NAMED = "BACKBONE.NAME resnet50 (--arch resnet50 in tools/convert.py)"


@dataclass(frozen=True)
class Loaded:
    """A backbone in eval mode, what it is, and where it came from."""

    backbone: nn.Module
    description: Description
    layout: str  # a name in LAYOUTS, OUR_FILE, RANDOM, or GIVEN
    file_sha256: str | None  # None for random weights
    tensors_sha256: str
    left_behind: tuple[str, ...]  # what the file holds beside the backbone
    said: tuple[str, ...] = ()  # sentences that a tool prints: which network was taken, and so on


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

    `source` is a path, an http(s) address, which is downloaded once and cached, or `random`. Our
    own files say what they hold; for others `arch` names the timm model, unless the file does, as
    MoCo's do, `kwargs` its arguments, `container` and `prefix` the place in the file if it holds
    several networks or has an unknown layout, and `mean` and `std` (RGB in [0, 1]) the input of its
    pretraining, where that is not known; `channels` (RGB or BGR) is the order in a file of
    Detectron2, if it is not known. The network returned is always for RGB. Where both speak they
    must agree.
    """
    given = _checked_input(mean, std)
    if str(source) == RANDOM:
        return _random_backbone(arch, kwargs, seed, given)
    name, path = str(source), local_path(source, cache_folder())
    if not path.is_file():
        raise KsclError(
            f"{name}: there is no such file of weights: correct the path, or say '{RANDOM}' for "
            "random ones."
        )
    content, description, dropped = _read(path, name)
    says_itself = description is not None
    if description is None:
        description = Description(_named(content, arch, name), dict(kwargs or {}))
    elif arch is not None and (arch, _lists(kwargs)) != (description.arch, description.kwargs):
        raise KsclError(
            f"{name} holds {description.arch} {description.kwargs}, not {arch} {_lists(kwargs)}: "
            "name that network, or none."
        )
    backbone = build_backbone(description.arch, description.kwargs)
    place = {"container": container, "prefix": prefix, "channels": channels}
    found = _found(content, backbone, name, place, dropped)
    if found.stride_in_1x1 is not False and STRIDE_IN_1X1 not in description.kwargs:
        usual = "true" if found.stride_in_1x1 else "false or true"
        raise KsclError(
            f"{name} ({found.layout}): say which convolution of a block has the stride, "
            f"--arch-kwargs '{{{STRIDE_IN_1X1}: …}}' (BACKBONE.KWARGS in a config): {usual} here, "
            "which is MODEL.RESNETS.STRIDE_IN_1X1 of its Detectron2 config."
        )
    if says_itself:
        _check_agrees(description, given, name)
    else:
        description = _with_input(description, found, given, name)
    ours = says_itself and path.suffix == ".safetensors"
    backbone.load_state_dict(found.tensors, strict=True)
    backbone.eval()
    said = [found.said] if found.said else []
    if not says_itself and not given and found.layout.startswith(TIMM_LAYOUTS):
        colors = (description.mean, description.std)
        if colors != (IMAGENET_MEAN, IMAGENET_STD):
            said.append(
                f"Its input is taken to be that of {description.arch} in timm: mean {colors[0]}, "
                f"std {colors[1]}; --mean and --std say otherwise."
            )
    if dropped:
        said.append(f"Of the file only tensors were read, and not {', '.join(dropped)}.")
    return Loaded(
        backbone,
        description,
        OUR_FILE if ours else found.layout,
        sha256_of(path),
        tensors_hash(backbone),
        found.left_behind,
        tuple(said),
    )


def _named(content: Mapping[str, Any], arch: str | None, name: str) -> str:
    """Return the timm model of another project's file: what the user names, or the file itself.

    MoCo, SimSiam, timm and PyTorch's ImageNet example save it as `arch`; others' names may not be
    timm's, as MoCo v3's vit_small.
    """
    own = content.get("arch")
    says = without_escapes(own)[:60] if isinstance(own, str) else ""
    is_timms = bool(says) and timm.is_model(own)
    if arch is None:
        if is_timms:
            return str(own)
        called = f", which it calls '{says}'" if says else ""
        raise KsclError(
            f"{name} does not say which timm model it holds{called}: name it, as in {NAMED}."
        )
    if is_timms and says.partition(".")[0] != arch.partition(".")[0]:  # without timm's tag
        raise KsclError(
            f"{name} says that it holds {says}, not {arch}: name that network, or none. If the "
            "file is mistaken, save its state dict alone and give that file."
        )
    return arch


def _found(
    content: dict[str, Any],
    backbone: nn.Module,
    name: str,
    place: Mapping[str, str | None],
    dropped: tuple[str, ...],
) -> Found:
    try:
        return find_tensors(content, backbone, name, **place)
    except NotFound as error:
        if not dropped:
            raise
        objects = f"Python objects in it ({some(list(dropped))}) were not read"
        raise KsclError(f"{error}\n  {objects}. {THREE_LINES}") from error


def _checked_input(
    mean: Sequence[float] | None, std: Sequence[float] | None
) -> dict[str, tuple[float, ...]]:
    """Return what the user says of the input, by field."""
    given = {"mean": mean, "std": std}
    chosen = {key: tuple(value) for key, value in given.items() if value is not None}
    for key, value in chosen.items():
        if len(value) != 3 or not all(0 <= v <= 1 for v in value) or (key == "std" and 0 in value):
            raise KsclError(
                f"--{key} (INPUT.{key.upper()}) is {value}. Give three numbers from 0 to 1: red, "
                "green, blue."
            )
    return chosen


def _check_agrees(
    description: Description, given: Mapping[str, tuple[float, ...]], name: str
) -> None:
    """Raise an error if a file that tells its input tells another than the user."""
    for key, value in given.items():
        known = getattr(description, key)
        if any(abs(a - b) > SAME_COLOR for a, b in zip(value, known, strict=True)):
            raise KsclError(
                f"{name} says that its {key} is {known}, not {value}: leave --{key} "
                f"(INPUT.{key.upper()}) out, or say the same."
            )


def _with_input(
    description: Description, found: Found, given: Mapping[str, tuple[float, ...]], name: str
) -> Description:
    """Complete the description of another project's file: its input is known, or asked for."""
    known: dict[str, tuple[float, ...]] = {}
    why_ask = found.why_ask
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
    elif found.input is not None:
        known = dict(zip(("mean", "std"), found.input, strict=True))
    missing = [key for key in ("mean", "std") if key not in given and key not in known]
    if missing:
        raise KsclError(
            f"{name} (read as {found.layout}): the {' and '.join(missing)} of its input must be "
            f"given: {why_ask}. Say --mean R G B --std R G B (INPUT.MEAN and INPUT.STD of a "
            "probe): 0 0 0 and 1 1 1 for plain [0, 1], 0.485 0.456 0.406 and 0.229 0.224 0.225 for "
            "ImageNet's."
        )
    return replace(description, **{**known, **given})  # type: ignore[arg-type]


def tensors_hash(module: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers, by name, type, shape and bytes."""
    return checksum(module.state_dict())


def _random_backbone(
    arch: str | None,
    kwargs: Mapping[str, Any] | None,
    seed: int,
    given: Mapping[str, tuple[float, ...]],
) -> Loaded:
    if arch is None:
        raise KsclError(f"Random weights of which network? Name the timm model, as in {NAMED}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = build_backbone(arch, kwargs).eval()
    description = Description(arch, dict(kwargs or {}), source={"method": RANDOM, "seed": seed})
    description = replace(description, **given)  # type: ignore[arg-type]
    return Loaded(backbone, description, RANDOM, None, tensors_hash(backbone), ())


def _read(path: Path, name: str) -> tuple[dict[str, Any], Description | None, tuple[str, ...]]:
    """Return a file's tensors, what it says of them, if it does, and the objects left unread."""
    if path.suffix == ".safetensors":
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
        except (safetensors.SafetensorError, OSError, ValueError, AttributeError) as error:
            raise KsclError(
                f"{name} is not a whole safetensors file ({first_line(error)}): copy it again."
            ) from error
        about = metadata.get(DESCRIPTION)
        if about is None:
            return tensors, None, ()
        if metadata.get(CHECKSUM) not in (None, checksum(tensors, about)):
            raise KsclError(
                f"{name} is damaged or was changed: its tensors and description do not match its "
                "checksum. Copy it again, or export the backbone again."
            )
        return tensors, parse_description(about, name), ()
    if path.suffix == ".pkl" and not zipfile.is_zipfile(path):
        return read_arrays_pickle(path), None, ()
    content, dropped = read_tensors(path)
    if "learner" not in content or "description" not in content:
        return content, None, dropped  # somebody else's, whatever else is in it
    return content, check_description(content["description"], name), dropped


def _lists(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return arguments as JSON gives them back, which has no tuples."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in (kwargs or {}).items()}
