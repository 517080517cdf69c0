"""DINOv2's own files, by timm's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

SWIGLU = (".mlp.w12.", ".mlp.fc1."), (".mlp.w3.", ".mlp.fc2.")  # in the giant model
CLASS, REGISTERS, POSITIONS = "cls_token", "register_tokens", "pos_embed"


def with_timm_names(content: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a file's content; if it has DINOv2's names, with timm's instead.

    In a model with registers, timm has no position embedding for the class token: it is added to
    the token.
    """
    renamed = dict(content)
    for key in [key for key in renamed if isinstance(key, str)]:
        for theirs, ours in SWIGLU:
            if theirs in key:
                renamed[key.replace(theirs, ours)] = renamed.pop(key)
    tokens: list[Any] = [renamed.get(name) for name in (CLASS, REGISTERS, POSITIONS)]
    if all(isinstance(value, Tensor) and value.ndim == 3 for value in tokens):
        token, registers, positions = tokens
        del renamed[REGISTERS]
        renamed |= {CLASS: token + positions[:, :1], "reg_token": registers}
        renamed[POSITIONS] = positions[:, 1:]
    return renamed
