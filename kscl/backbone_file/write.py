"""Write a backbone so that equal weights and descriptions give equal bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from kscl.backbone_file.describe import DESCRIPTION, DESCRIPTION_VERSION, Description
from kscl.runtime.files import write_atomically

CHECKSUM = "sha256"  # the key in the metadata for that of description and tensors
HEADER_SIZE = 8  # bytes that hold the length of the header, little endian


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
