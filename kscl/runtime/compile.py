"""Compiled networks: what torch.compile needs, asked for before a run rather than in its midst."""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch
from torch import nn

from kscl.errors import KsclError

COMPILERS = ("g++", "clang++", "gcc", "clang")


def compile_in_place(module: nn.Module, backend: str, device: torch.device) -> None:
    """Let a module compile itself at its first call; its state dict keeps its names."""
    if backend == "off":
        return
    if backend == "inductor":
        _require_compiler(device)
    module.compile(backend=backend)


def _require_compiler(device: torch.device) -> None:
    named = os.environ.get("CXX")
    missing = []
    if not any(shutil.which(name) for name in ((named,) if named else COMPILERS)):
        missing.append(f"a C++ compiler (CXX={named})" if named else "a C++ compiler (g++)")
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        missing.append("Triton (pip install triton)")
    if missing:
        raise KsclError(
            f"SOLVER.COMPILE inductor needs {' and '.join(missing)}, which is not installed here. "
            "Install it, or set SOLVER.COMPILE off."
        )
