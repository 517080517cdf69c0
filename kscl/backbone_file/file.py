"""Our own file, `backbone.safetensors`: the weights, and a description checked field by field.

Equal weights and descriptions give equal bytes. A file may come from anywhere, so what it says
about itself is checked before anything is built from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from torch import Tensor

from kscl.errors import KsclError, printable
from kscl.methods.encoder import check_arguments
from kscl.runtime.files import write_atomically

DESCRIPTION = "kscl_backbone"  # the key in a safetensors file's metadata
DESCRIPTION_VERSION = 1
CHECKSUM = "sha256"  # the key in the metadata for that of description and tensors
HEADER_SIZE = 8  # bytes that hold the length of the header, little endian
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
LARGEST_SIZE = 4096  # pixels
FIX = "Export the backbone again (kscl pretrain, or kscl.save_backbone)."


@dataclass(frozen=True)
class Description:
    """What anyone needs to use the weights of a backbone correctly."""

    arch: str  # a timm model name
    kwargs: dict[str, Any] = field(default_factory=dict)  # for timm.create_model
    mean: tuple[float, ...] = IMAGENET_MEAN  # of the input, RGB in [0, 1]
    std: tuple[float, ...] = IMAGENET_STD
    size: int = 224
    source: dict[str, Any] = field(default_factory=dict)  # the run: config hash, method, epochs


def save_backbone(
    path: str | Path, tensors: Mapping[str, Tensor], description: Description
) -> None:
    """Write `backbone.safetensors`, which timm.create_model takes as its checkpoint_path."""
    about = {"version": DESCRIPTION_VERSION, **asdict(description)}
    text = json.dumps(about, sort_keys=True)
    metadata = {DESCRIPTION: text, CHECKSUM: checksum(tensors, text), "format": "pt"}
    write_atomically(Path(path), to_safetensors(tensors, metadata))


def checksum(tensors: Mapping[str, Tensor], about: str = "") -> str:
    """Return the SHA-256 of a description and all tensors, by name, type, shape and bytes."""
    digest = hashlib.sha256(about.encode("utf-8", "surrogatepass"))
    for key, value in sorted(tensors.items()):
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(
            value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def to_safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file, the same for the same content.

    The library writes metadata in the order of a hash table that differs from call to call, so the
    same weights would have several SHA-256s. The header is written again with sorted keys; the
    tensors' offsets count from its end and do not change.
    """
    content = safetensors.torch.save(dict(tensors), dict(metadata))
    end = HEADER_SIZE + int.from_bytes(content[:HEADER_SIZE], "little")
    header = json.loads(content[HEADER_SIZE:end])
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    return len(text).to_bytes(HEADER_SIZE, "little") + text + content[end:]


def read_safetensors(path: Path, name: str) -> tuple[dict[str, Tensor], Description | None]:
    """Return a file's tensors, and its description if the file is ours; `name` is for errors."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (safetensors.SafetensorError, OSError, ValueError, AttributeError) as error:
        reason = printable(str(error).split("\n")[0])[:300]
        raise KsclError(
            f"{name} is not a complete safetensors file ({reason}). Copy it again."
        ) from error
    about = metadata.get(DESCRIPTION)
    if about is None:
        return tensors, None
    if metadata.get(CHECKSUM) not in (None, checksum(tensors, about)):
        raise KsclError(
            f"{name} is damaged or was changed: its tensors and description do not match its "
            "checksum. Copy it again, or export the backbone again."
        )
    try:
        fields_of_file = json.loads(about)
    except (ValueError, RecursionError) as error:
        raise _refused(name, DESCRIPTION, f"is not JSON ({error})") from error
    return tensors, check_description(fields_of_file, name)


def check_description(about: object, name: str) -> Description:
    """Return the description in plain values; the first wrong field is an error."""
    if not isinstance(about, Mapping):
        raise _refused(name, DESCRIPTION, "must be an object with fields", about)
    version = about.get("version")
    if type(version) is not int or version != DESCRIPTION_VERSION:
        raise _refused(name, "version", f"must be {DESCRIPTION_VERSION}", version)
    given = {key: value for key, value in about.items() if key != "version"}
    known = [f.name for f in fields(Description)]
    for key in sorted({*known} ^ {*given}, key=str):
        raise _refused(name, str(key)[:40], f"is missing or is not one of {', '.join(known)}")
    for key, value in given.items():
        if problem := _problem(key, value):
            raise _refused(name, key, problem, value)
    return Description(**{**given, "mean": tuple(given["mean"]), "std": tuple(given["std"])})


def _refused(name: str, key: str, problem: str, *got: object) -> KsclError:
    found = f", got {str(got[0])[:60]!r}" if got else ""
    return KsclError(f"{name}: the field '{key}' of its description {problem}{found}. {FIX}")


def _problem(key: str, value: Any) -> str:
    """Return what a field must be if it is something else."""
    if key == "arch" and not (isinstance(value, str) and timm.is_model(value)):
        return "must be the name of a timm model"
    if key == "source" and not isinstance(value, dict):
        return "must be an object with fields"
    if key == "size" and not (type(value) is int and 1 <= value <= LARGEST_SIZE):
        return f"must be a whole number of pixels from 1 to {LARGEST_SIZE}"
    if key in ("mean", "std") and not _is_color(value, positive=key == "std"):
        return f"must be three finite numbers{' above 0' if key == 'std' else ''}"
    if key == "kwargs":
        if not isinstance(value, dict) or not all(isinstance(each, str) for each in value):
            return "must be an object of arguments by name"
        try:
            check_arguments(value)
        except KsclError as error:
            return f"holds a refused argument ({str(error).removesuffix('.')})"
    return ""


def _is_color(value: object, positive: bool) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 3
        and all(type(v) in (int, float) and abs(v) <= 1e6 for v in value)  # NaN is not
        and not (positive and min(value) <= 0)
    )
