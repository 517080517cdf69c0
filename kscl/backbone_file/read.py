"""Read a backbone from a file, an address or a seed; nothing but tensors is ever loaded."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import nn

from kscl.backbone_file.describe import (
    DESCRIPTION,
    Description,
    check_description,
    parse_description,
)
from kscl.backbone_file.layouts import find_tensors
from kscl.backbone_file.write import CHECKSUM, checksum
from kscl.data.index_cache import cache_folder
from kscl.errors import KsclError
from kscl.method.encoder import build_backbone
from kscl.runtime.files import sha256_of
from kscl.runtime.paths import local_path

RANDOM = "random"
OUR_FILE = "kscl backbone"
NAMED = "BACKBONE.NAME resnet50 (--arch resnet50 in tools/convert.py)"


@dataclass(frozen=True)
class Loaded:
    """A backbone in eval mode, what it is, and where it came from."""

    backbone: nn.Module
    description: Description
    layout: str  # a name in LAYOUTS, OUR_FILE or RANDOM
    file_sha256: str | None  # None for random weights
    tensors_sha256: str
    left_behind: tuple[str, ...]  # tensors of the file that do not belong to the backbone


def load_backbone(
    source: str | Path,
    arch: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Loaded:
    """Return a backbone from a file of ours or another project's, or random weights from a seed.

    `source` is a path, an http(s) address, which is downloaded once and cached, or `random`. Our
    own files say what they hold; for others `arch` names the timm model, and `kwargs` its
    arguments. Where both speak they must agree.
    """
    if str(source) == RANDOM:
        return _random_backbone(arch, kwargs, seed)
    name, path = str(source), local_path(source, cache_folder())
    if not path.is_file():
        raise KsclError(
            f"{name}: there is no such file of weights: correct the path, or say '{RANDOM}' for "
            "random ones."
        )
    content, description = _read(path, name)
    says_itself = description is not None
    if description is None:
        if arch is None:
            raise KsclError(
                f"{name} does not say which network it holds: name the timm model, as in {NAMED}."
            )
        description = Description(arch, dict(kwargs or {}))
    elif arch is not None and (arch, _lists(kwargs)) != (description.arch, description.kwargs):
        raise KsclError(
            f"{name} holds {description.arch} {description.kwargs}, not {arch} {_lists(kwargs)}: "
            "name that network, or none."
        )
    backbone = build_backbone(description.arch, description.kwargs)
    layout, tensors, left_behind = find_tensors(content, backbone, name)
    if says_itself and path.suffix == ".safetensors":
        layout = OUR_FILE
    backbone.load_state_dict(tensors, strict=True)
    backbone.eval()
    return Loaded(
        backbone, description, layout, sha256_of(path), tensors_hash(backbone), left_behind
    )


def tensors_hash(module: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers, by name, type, shape and bytes."""
    return checksum(module.state_dict())


def read_plain(path: Path) -> dict[str, Any]:
    """Return what torch.save wrote, if it is data; refuse a file that would run code, unread."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise KsclError(
            f"{path} is not plain tensors: it is damaged, or a pickle that would run code when "
            "read, so it was not read. If you trust where it comes from, load it there and save "
            f"the state dict alone with torch.save. ({_first_line(error)})"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise KsclError(
            f"{path} cannot be read as a checkpoint ({_first_line(error)}): copy it again."
        ) from error
    if not isinstance(content, dict):
        raise KsclError(
            f"{path} holds a {type(content).__name__}, not a dict of tensors: save a state dict."
        )
    return content


def _random_backbone(arch: str | None, kwargs: Mapping[str, Any] | None, seed: int) -> Loaded:
    if arch is None:
        raise KsclError(f"Random weights of which network? Name the timm model, as in {NAMED}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = build_backbone(arch, kwargs).eval()
    description = Description(arch, dict(kwargs or {}), source={"method": RANDOM, "seed": seed})
    return Loaded(backbone, description, RANDOM, None, tensors_hash(backbone), ())


def _read(path: Path, name: str) -> tuple[dict[str, Any], Description | None]:
    """Return the tensors of a file, and what it says of them, if it does."""
    if path.suffix == ".safetensors":
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
        except (safetensors.SafetensorError, OSError, ValueError, AttributeError) as error:
            raise KsclError(
                f"{name} is not a whole safetensors file ({_first_line(error)}): copy it again."
            ) from error
        about = metadata.get(DESCRIPTION)
        if about is None:
            return tensors, None
        if metadata.get(CHECKSUM) not in (None, checksum(tensors, about)):
            raise KsclError(
                f"{name} is damaged or was changed: its tensors and description do not match its "
                "checksum. Copy it again, or export the backbone again."
            )
        return tensors, parse_description(about, name)
    content = read_plain(path)
    if "learner" not in content or "description" not in content:
        return content, None  # somebody else's, whatever else is in it
    return content, check_description(content["description"], name)


def _lists(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return arguments as JSON gives them back, which has no tuples."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in (kwargs or {}).items()}


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0] or type(error).__name__
