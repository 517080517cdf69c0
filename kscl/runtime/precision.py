"""Mixed precision: the types behind the names that configs use (SOLVER.AMP)."""

from __future__ import annotations

import torch

AMP_TYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, amp: torch.dtype | None) -> torch.autocast:
    """Return a context in which operations run in this type; None switches it off."""
    return torch.autocast(device.type, amp or torch.bfloat16, enabled=amp is not None)
