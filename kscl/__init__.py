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
    "Encoder": "kscl.methods.encoder",
    "KsclError": "kscl.errors",
    "KSCL": "kscl.methods.kscl",
    "MemoryBank": "kscl.methods.dictionary",
    "Minibatch": "kscl.methods.dictionary",
    "Queue": "kscl.methods.dictionary",
    "fit_subspaces": "kscl.methods.subspace",
    "load_backbone": "kscl.backbone_file",
    "load_config": "kscl.keys",
    "projection_length": "kscl.methods.subspace",
    "retrieve_instance": "kscl.methods.subspace",
    "save_backbone": "kscl.backbone_file",
}

put_packages_before_tools()
warn_of_hidden_packages()
silence_library_messages()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kscl' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
