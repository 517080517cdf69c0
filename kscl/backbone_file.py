"""Backbones in files: writing ours, and reading ours or another project's, tensor by tensor.

A file is read by an explicit table of layouts. Every tensor of the backbone must be found and every
tensor of the file must be used or be on the layout's list of things to leave behind; anything else
is an error, because a network that is silently half loaded gives a wrong number much later.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from kscl.errors import KsclError
from kscl.method.encoder import build_backbone
from kscl.runtime.files import sha256_of, write_atomically

RANDOM = "random"
NAMED = "BACKBONE.NAME resnet50 (--arch resnet50 in tools/convert.py)"
OUR_FILE = "kscl backbone"
DESCRIPTION = "kscl_backbone"
DESCRIPTION_VERSION = 1
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

State = dict[str, Tensor]


@dataclass(frozen=True)
class Description:
    """What must travel with the weights of a backbone for anyone to use them rightly."""

    arch: str  # a timm model name
    kwargs: dict[str, Any] = field(default_factory=dict)  # for timm.create_model
    mean: tuple[float, ...] = IMAGENET_MEAN  # of the input, RGB in [0, 1]
    std: tuple[float, ...] = IMAGENET_STD
    size: int = 224
    source: dict[str, Any] = field(default_factory=dict)  # the run: config hash, method, epochs


@dataclass(frozen=True)
class Loaded:
    """A backbone in eval mode, what it is, and where it came from."""

    backbone: nn.Module
    description: Description
    layout: str  # a name in LAYOUTS, OUR_FILE or RANDOM
    file_sha256: str | None  # None for random weights
    tensors_sha256: str
    left_behind: tuple[str, ...]  # tensors of the file that are no part of the backbone


@dataclass(frozen=True)
class Layout:
    """How one kind of checkpoint names a backbone's tensors, and what else it holds."""

    container: tuple[str, ...]  # keys that lead to the dict of tensors
    prefix: str
    leave_behind: tuple[str, ...] = ()  # prefixes of tensors that belong to something else


# In this order; of MoCo's two encoders the query encoder is taken, as MoCo's own evaluation does.
LAYOUTS: dict[str, Layout] = {
    "kscl checkpoint": Layout(
        ("learner",), "encoder.backbone.", ("encoder.head.", "key_encoder.", "dictionary.", "steps")
    ),
    "moco": Layout(
        ("state_dict",),
        "module.encoder_q.",
        ("module.encoder_q.fc.", "module.encoder_k.", "module.queue"),
    ),
    "moco v3": Layout(
        ("state_dict",),
        "module.base_encoder.",
        ("module.base_encoder.fc.", "module.momentum_encoder.", "module.predictor."),
    ),
    "simclr (state_dict, backbone)": Layout(
        ("state_dict",),
        "backbone.",
        ("backbone.fc.", "projector.", "projection_head.", "classifier.", "momentum_"),
    ),
    "simclr (state_dict, encoder)": Layout(
        ("state_dict",), "encoder.", ("encoder.fc.", "projector.", "projection_head.", "head.")
    ),
    "simclr (model, backbone)": Layout(
        ("model",), "backbone.", ("backbone.fc.", "projector.", "projection_head.", "classifier.")
    ),
    "plain": Layout((), "", ("fc.", "head.", "classifier.")),
    "plain (state_dict)": Layout(("state_dict",), "", ("fc.", "head.", "classifier.")),
    "plain (model)": Layout(("model",), "", ("fc.", "head.", "classifier.")),
    "distributed (state_dict)": Layout(("state_dict",), "module.", ("module.fc.", "module.head.")),
    "distributed (model)": Layout(("model",), "module.", ("module.fc.", "module.head.")),
}


def save_backbone(path: str | Path, tensors: State, description: Description) -> None:
    """Write `backbone.safetensors`, which timm.create_model takes as its checkpoint_path."""
    about = {"version": DESCRIPTION_VERSION, **asdict(description)}
    metadata = {DESCRIPTION: json.dumps(about, sort_keys=True), "format": "pt"}
    write_atomically(Path(path), safetensors.torch.save(tensors, metadata))


def load_backbone(
    source: str | Path,
    arch: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Loaded:
    """A backbone from a file of ours or another project's, or `random` weights from a seed.

    Our own files say what they hold; for others `arch` names the timm model, and `kwargs` its
    arguments. Where both speak they must agree.
    """
    if str(source) == RANDOM:
        return _random_backbone(arch, kwargs, seed)
    path = Path(source)
    if not path.is_file():
        raise KsclError(f"{path}: no such file of weights (or say '{RANDOM}' for random ones)")
    content, description = _read(path)
    says_itself = description is not None
    if description is None:
        if arch is None:
            raise KsclError(
                f"{path} does not say which network it holds: name the timm model, as in {NAMED}"
            )
        description = Description(arch, dict(kwargs or {}))
    elif arch is not None and (arch, _lists(kwargs)) != (description.arch, description.kwargs):
        raise KsclError(
            f"{path} holds {description.arch} {description.kwargs}, not {arch} {_lists(kwargs)}"
        )
    backbone = build_backbone(description.arch, description.kwargs)
    layout, tensors, left_behind = find_tensors(content, backbone, str(path))
    if says_itself and path.suffix == ".safetensors":
        layout = OUR_FILE
    backbone.load_state_dict(tensors, strict=True)
    backbone.eval()
    return Loaded(
        backbone, description, layout, sha256_of(path), tensors_hash(backbone), left_behind
    )


def find_tensors(
    content: Mapping[str, Any], backbone: nn.Module, name: str
) -> tuple[str, State, tuple[str, ...]]:
    """The backbone's tensors in a checkpoint: (layout, tensors by timm's names, left behind)."""
    wanted = backbone.state_dict()
    near_misses = []
    for layout_name, layout in LAYOUTS.items():
        tensors = _tensors_at(content, layout.container)
        found = {key: tensors.get(layout.prefix + key) for key in wanted}
        missing = [key for key, value in found.items() if value is None]
        # Files from before PyTorch 0.4.1 have no such counters; nothing is computed from them.
        missing = [key for key in missing if not key.endswith("num_batches_tracked")]
        if len(missing) == len([k for k in wanted if not k.endswith("num_batches_tracked")]):
            continue
        if missing:
            near_misses.append(f"as '{layout_name}' {_some(missing)} would be missing")
            continue
        used = {layout.prefix + key for key in wanted}
        rest = [key for key in tensors if key not in used]
        unknown = [key for key in rest if not key.startswith(layout.leave_behind or ("\0",))]
        if unknown:
            near_misses.append(f"as '{layout_name}' {_some(unknown)} would have no place")
            continue
        complete = {key: wanted[key] if value is None else value for key, value in found.items()}
        _check_shapes(complete, wanted, name)
        return layout_name, complete, tuple(rest)
    reasons = "".join(f"\n  {reason}" for reason in near_misses)
    raise KsclError(
        f"{name} does not hold this network.{reasons}\n"
        f"  prefixes found in it: {', '.join(_prefixes(content)) or 'none with tensors'}\n"
        f"  layouts known: {', '.join(LAYOUTS)}"
    )


def tensors_hash(module: nn.Module) -> str:
    """Of all parameters and buffers, by name, type, shape and bytes."""
    digest = hashlib.sha256()
    for key, value in sorted(module.state_dict().items()):
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def read_plain(path: Path) -> dict[str, Any]:
    """What torch.save wrote, if it is data; a file that would run code is refused unread."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise KsclError(
            f"{path} is not plain tensors: it is damaged, or a pickle that would run code when "
            "read, so it was not read. If you trust where it comes from, load it there and save "
            f"the state dict alone with torch.save. ({_first_line(error)})"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise KsclError(f"{path} cannot be read as a checkpoint: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise KsclError(f"{path} holds a {type(content).__name__}, not a dict of tensors")
    return content


def _random_backbone(arch: str | None, kwargs: Mapping[str, Any] | None, seed: int) -> Loaded:
    if arch is None:
        raise KsclError(f"random weights of which network? Name the timm model, as in {NAMED}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = build_backbone(arch, kwargs).eval()
    description = Description(arch, dict(kwargs or {}), source={"method": RANDOM, "seed": seed})
    return Loaded(backbone, description, RANDOM, None, tensors_hash(backbone), ())


def _read(path: Path) -> tuple[dict[str, Any], Description | None]:
    if path.suffix == ".safetensors":
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                about = (file.metadata() or {}).get(DESCRIPTION)
        except (safetensors.SafetensorError, OSError) as error:
            raise KsclError(f"{path} is not a whole safetensors file: {error}") from error
        return tensors, _description(json.loads(about), path) if about else None
    content = read_plain(path)
    about = content.get("description") if "learner" in content else None  # else somebody else's
    return content, _description(about, path) if isinstance(about, dict) else None


def _description(about: dict[str, Any], path: Path) -> Description:
    about = dict(about)
    version = about.pop("version", None)
    if version != DESCRIPTION_VERSION:
        raise KsclError(
            f"{path} describes its backbone in version {version}; this release reads version "
            f"{DESCRIPTION_VERSION}"
        )
    about["mean"], about["std"] = tuple(about["mean"]), tuple(about["std"])
    return Description(**about)


def _tensors_at(content: Mapping[str, Any], container: tuple[str, ...]) -> State:
    node: Any = content
    for key in container:
        node = node.get(key) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        return {}
    return {key: value for key, value in node.items() if isinstance(value, Tensor)}


def _check_shapes(tensors: State, wanted: State, name: str) -> None:
    wrong = [
        f"{key} is {tuple(value.shape)} and should be {tuple(wanted[key].shape)}"
        for key, value in tensors.items()
        if value.shape != wanted[key].shape
    ]
    if wrong:
        raise KsclError(f"{name} holds a network of another size: {_some(wrong)}")


def _prefixes(content: Mapping[str, Any], inside: str = "") -> list[str]:
    """What stands before the first convolution's name, in every dict of the file."""
    found: dict[str, None] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            found.update(dict.fromkeys(_prefixes(value, f"{inside}[{key}] ")))
        elif isinstance(value, Tensor):
            parts = key.split(".")
            found[inside + ".".join(parts[: min(2, len(parts) - 1)])] = None
    return list(found)[:12]


def _lists(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """As JSON gives them back, which has no tuples."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in (kwargs or {}).items()}


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0] or type(error).__name__


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
