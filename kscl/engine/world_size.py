"""The number of processes of a run: a change is refused unless asked for, and is recorded.

Order, views and the global batch do not depend on it; what every process computes on its own part
of the batch does. Pretraining and detection resume by the same rule.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kscl.cli import WORLD_SIZE_OPTION
from kscl.runtime.processes.distributed import world_size

log = logging.getLogger(__name__)

WORLD_SIZE, WORLD_SIZES = "world_size", "world_sizes"  # entries of a checkpoint
WHAT_CHANGES = (
    "The global batch, its order and its views stay the same, but BatchNorm statistics differ: "
    "each process computes them on its own part of the batch."
)


def hint(what_changes: str) -> str:
    """Return what to do about another number of processes."""
    option = f"{WORLD_SIZE_OPTION} resumes on another number of processes; the record says so."
    return f"{option} {what_changes}"


HINTS = {WORLD_SIZE: hint(WHAT_CHANGES)}


def required(allow_change: bool) -> dict[str, int]:
    """Return what a checkpoint must hold for a run to resume from it."""
    return {} if allow_change else {WORLD_SIZE: world_size()}


def world_sizes(
    saved: Mapping[str, Any] | None, step: int, what_changes: str = WHAT_CHANGES
) -> list[list[int]]:
    """Return [first step, processes] of every part of the run, with the one that begins now."""
    parts = [list(part) for part in saved.get(WORLD_SIZES, [])] if saved is not None else []
    now = world_size()
    if parts and parts[-1][1] != now:
        log.warning(
            "Resuming with %d processes; until step %d there were %d. %s",
            *(now, step, parts[-1][1], what_changes),
        )
    if not parts or parts[-1][1] != now:
        parts.append([step, now])
    return parts
