"""The number of processes of a fine-tuning: a change is refused unless asked for, and is recorded.

Unlike those of a pretraining, its batches and views depend on it. Where a protocol is scaled to the
number of processes, a change is refused in any case.
"""

from __future__ import annotations

from detectron2.config import CfgNode

from kscl.cli import WORLD_SIZE_OPTION
from kscl.engine.world_size import WORLD_SIZE, hint

REFERENCE_KEY = "SOLVER.REFERENCE_WORLD_SIZE"
WHAT_CHANGES = (
    "The size of the batch stays the same, but its images, their views and BatchNorm statistics "
    "differ: each process groups its own images into batches and draws their views."
)


def hints(cfg: CfgNode) -> dict[str, str]:
    """Return what to do about another number of processes, by the entry that tells of it."""
    found = {
        REFERENCE_KEY: "Batch, learning rate and schedule of this protocol are scaled to the "
        "number of processes, so a run resumes on as many as it began with, even with "
        f"{WORLD_SIZE_OPTION}."
    }
    if not cfg.SOLVER.REFERENCE_WORLD_SIZE:
        found[WORLD_SIZE] = hint(WHAT_CHANGES)
    return found
