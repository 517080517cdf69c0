"""Names that settings had in earlier versions. An old name is an error that says the new one.

Old options of the command line are in `kscl.cli.RENAMED_OPTIONS`.
"""

from __future__ import annotations

from collections.abc import Sequence

# Old key: the new one. A section stands for all of its keys.
KEYS = {
    "METHOD.NAME": "LABEL",
    "NAME": "LABEL",
    "HEAD": "PROJECTOR",
    "DATA.UINT8": "DATA.NORMALIZE_ON_DEVICE",
    "DATA.BAD_IMAGES_MAX_SHARE": "DATA.MAX_BAD_FRACTION",
    "SOLVER.LR": "SOLVER.BASE_LR",
    "SOLVER.ACCUMULATE": "SOLVER.GRAD_ACCUM_STEPS",
    "SOLVER.SCHEDULE_BY": "SOLVER.LR_UPDATE",
    "KSCL.NUM_GPUS": "SOLVER.REFERENCE_WORLD_SIZE",
}

# Key: its old values and the new ones; of a list, its items.
VALUES = {
    "SOLVER.LR_UPDATE": {"step": "iter"},
    "INPUT.AUGMENT": {"centre": "center"},
    "CACHED.VIEWS": {"centre": "center"},
}

# Of a suite file, and of its section `shapes`.
SUITE_KEYS = {"against": "baseline"}
SHAPES_KEYS = {"output": "output_dir", "unlabelled": "unlabeled"}


def new_key(key: str) -> str | None:
    """Return what a key of earlier versions is called now, or None."""
    for old, new in KEYS.items():
        if key == old or key.startswith(f"{old}."):
            return new + key.removeprefix(old)
    return None


def old_value(key: str, value: object) -> tuple[str, str] | None:
    """Return (old, new) if a value, or an item of it, is one of earlier versions."""
    items: Sequence[object] = value if isinstance(value, list | tuple) else [value]
    for old, new in VALUES.get(key, {}).items():
        if old in items:
            return old, new
    return None
