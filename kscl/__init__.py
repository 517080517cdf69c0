"""K-shot contrastive learning: pretraining, and the records every evaluation of it writes.

The public API is imported on first use: a loader worker or a `--help` needs no torch or timm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kscl.runtime.startup import (
    put_packages_before_tools,
    silence_library_messages,
    warn_of_hidden_packages,
)

if TYPE_CHECKING:
    from kscl.backbone_file import load_backbone, save_backbone
    from kscl.errors import KsclError
    from kscl.keys import load_config
    from kscl.methods.dictionary import MemoryBank, Minibatch, Queue
    from kscl.methods.encoder import Encoder
    from kscl.methods.kscl import KSCL
    from kscl.methods.subspace import fit_subspaces, projection_length, retrieve_instance

__version__ = "0.1.0"

__all__ = [
    "KSCL",
    "Encoder",
    "KsclError",
    "MemoryBank",
    "Minibatch",
    "Queue",
    "__version__",
    "fit_subspaces",
    "load_backbone",
    "load_config",
    "projection_length",
    "retrieve_instance",
    "save_backbone",
]

_HOMES = {
    "kscl.backbone_file": ("load_backbone", "save_backbone"),
    "kscl.errors": ("KsclError",),
    "kscl.keys": ("load_config",),
    "kscl.methods.dictionary": ("MemoryBank", "Minibatch", "Queue"),
    "kscl.methods.encoder": ("Encoder",),
    "kscl.methods.kscl": ("KSCL",),
    "kscl.methods.subspace": ("fit_subspaces", "projection_length", "retrieve_instance"),
}

put_packages_before_tools()
warn_of_hidden_packages()
silence_library_messages()


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'kscl' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
