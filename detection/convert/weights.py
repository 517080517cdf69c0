"""Converted weights: their names, reading them as data, and making sure that a model holds them.

Detectron2 matches names by their ends and raises no error when none match, so after every load the
model's tensors are compared with the file's, one by one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.checkpoint import DetectionCheckpointer
from torch import Tensor, nn

from detection.errors import DetectionError
from kscl.backbone_file import read_arrays_pickle, read_plain, read_tensors
from kscl.backbone_file.detectron2 import (
    DETECTRON2_NAME,
    LAYERS,
    LAYERS_BACK,
    MODEL_PREFIXES,
    exists,
    timm_name,
)

AUTHOR = "kscl"
# What a detector has beyond its network; it starts at random, as nothing pretrained has such parts.
NEW_PARTS = (
    "proposal_generator.rpn_head.",
    "roi_heads.box_head.",
    "roi_heads.box_predictor.",
    "roi_heads.mask_head.",
    "roi_heads.res5.norm.",
    "head.",  # RetinaNet's
    "backbone.fpn_lateral",
    "backbone.fpn_output",
    "backbone.simfp_",
    "backbone.top_block.",
)
INPUT_BUFFERS = ("pixel_mean", "pixel_std")  # set from the config
CONVERT_IT = "Convert the source: python tools/convert.py FILE --output-dir FOLDER"
COUNTER = (
    "num_batches_tracked"  # nothing is computed from it while BatchNorm's momentum is a number
)
# Where a built detector has its timm network, whose tensors keep timm's names behind it: under an
# FPN, under a simple feature pyramid. A file of converted weights has the whole name.
TIMM_PREFIX = {"bottom_up": "backbone.bottom_up.network.", "net": "backbone.net.network."}

_TIMM = re.compile(r"(?:layer(?P<stage>[1-4])\.(?P<block>\d+)\.)?(?P<layer>.+)\.(?P<tensor>\w+)")


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a file of the converter by Detectron2's names; refuse any other."""
    path = Path(path)
    if not path.is_file():
        raise DetectionError(f"{path}: there is no such file of converted weights. {CONVERT_IT}")
    if path.suffix == ".pkl":
        content = read_arrays_pickle(path)
    elif path.suffix == ".pth":
        content = read_plain(path)
    else:
        raise DetectionError(f"{path} is neither .pth nor .pkl. {CONVERT_IT}")
    tensors = content.get("model")
    if "__author__" not in content or not isinstance(tensors, dict) or not tensors:
        raise DetectionError(
            f"{path} is not a converted file, and Detectron2 would load little or nothing of it "
            f"without an error. {CONVERT_IT}"
        )
    named = {key: value for key, value in tensors.items() if isinstance(value, Tensor)}
    strange = [key for key in named if without_prefix(key) != key]
    if strange:
        raise DetectionError(
            f"{path} holds tensors that are not of a backbone: {_some(strange)}. {CONVERT_IT}"
        )
    if content.get("matching_heuristics", False) is not by_heuristics(named):
        raise DetectionError(
            f"{path}: Detectron2 would load little or nothing of it without an error, because its "
            f"matching_heuristics is not {by_heuristics(named)}. {CONVERT_IT}"
        )
    return named


def by_heuristics(tensors: Mapping[str, Any]) -> bool:
    """Return whether Detectron2 must match the names by their ends.

    Those of a ResNet have no prefix, so that res5 goes into the head of a C4; those of a timm
    network are complete.
    """
    return not any(name.startswith(tuple(TIMM_PREFIX.values())) for name in tensors)


def read_detectron2(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file of Detectron2, ours or not, by its names."""
    content = read_arrays_pickle(path) if path.suffix == ".pkl" else read_tensors(path)[0]
    found = content.get("model", content)
    tensors = found if isinstance(found, dict) else {}
    return {str(key): value for key, value in tensors.items() if isinstance(value, Tensor)}


def load_weights(model: nn.Module, path: str | Path) -> int:
    """Load by Detectron2's own matching of names, and check; return the number of tensors."""
    tensors = read_weights(path)
    # The tensors that were read, not the path: Detectron2 would run what a .pkl contains.
    with quietly("fvcore.common.checkpoint", "detectron2"):
        DetectionCheckpointer(model)._load_model(
            {
                "model": dict(tensors),
                "matching_heuristics": by_heuristics(tensors),
                "__author__": AUTHOR,
            }
        )
    return compare(model, tensors, path)


def check_loaded(model: nn.Module, path: str | Path) -> int:
    """Raise an error unless the model's network holds exactly the tensors of the file."""
    return compare(model, read_weights(path), path)


def compare(model: nn.Module, from_file: dict[str, Tensor], path: str | Path) -> int:
    """Do as `check_loaded` does, for a file that has been read."""
    in_model = network_tensors(model.state_dict())
    absent = [key for key in in_model if key not in from_file]
    unused = [key for key in from_file if key not in in_model]
    both = [key for key in in_model if key in from_file]
    different = [key for key in both if not _same(in_model[key], from_file[key])]
    if absent or unused or different:
        loaded = len(in_model) - len(absent) - len(different)
        reasons = [
            f"  {text}: {_some(keys)}"
            for keys, text in (
                (absent, "not in the file, so left at random"),
                (different, "of another shape or value than in the file"),
                (unused, "in the file, but not in the model"),
            )
            if keys
        ]
        raise DetectionError(
            f"The model holds {loaded} of the {len(in_model)} tensors of its network from {path}:\n"
            + "\n".join(reasons)
            + "\nUse a config of the weights' network: see config.yaml beside them."
        )
    return len(in_model)


def check_rest_is_new(model: nn.Module) -> None:
    """Raise an error if a part beside the network is not known to start at random."""
    unknown = [
        key
        for key in model.state_dict()
        if without_prefix(key) is None
        and not key.endswith(COUNTER)
        and not key.startswith(NEW_PARTS)
        and key not in INPUT_BUFFERS
    ]
    if unknown:
        raise DetectionError(
            "The detector has parts that no weights fill and that are not known to start at "
            f"random: {_some(unknown)}. Use a config from configs/detection/."
        )


def _same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and torch.equal(ours.detach().cpu(), theirs.to(ours.dtype))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def as_arrays(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Return the tensors as NumPy arrays."""
    return {key: tensor.numpy() for key, tensor in tensors.items()}


@contextmanager
def quietly(*names: str) -> Iterator[None]:
    """Silence loggers: Detectron2 warns in the same words about right and failed loads."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def to_detectron2(name: str) -> str:
    """Return Detectron2's name of a tensor of timm's; another name is an error."""
    match = _TIMM.fullmatch(name)
    layer = LAYERS.get(match["layer"]) if match else None
    if match is None or layer is None or not exists(match["stage"], layer, match["tensor"]):
        raise DetectionError(f"{name} is not a tensor of a plain timm ResNet.")
    block = f"res{int(match['stage']) + 1}.{match['block']}" if match["stage"] else "stem"
    return f"{block}.{layer}.{match['tensor']}"


def to_timm(name: str) -> str:
    """Return timm's name of a tensor of Detectron2's, which is given without its prefix."""
    ours = timm_name(name) if without_prefix(name) == name else None
    if ours is None:
        raise DetectionError(f"{name} is not a tensor of a Detectron2 ResNet.")
    return ours


def rename(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return a timm backbone's tensors by Detectron2's names, and the counters left out."""
    counters = [name for name in tensors if name.rpartition(".")[2] == COUNTER]
    carried = {
        to_detectron2(name): tensor.detach().cpu().contiguous()
        for name, tensor in tensors.items()
        if name not in counters
    }
    return carried, counters


def network_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return those tensors of a built model that are its network's, by their names in a file."""
    return {bare: state[name] for name in state if (bare := without_prefix(name)) is not None}


def without_prefix(name: str) -> str | None:
    """Return a tensor's name in a file of weights, or None if it is not part of the network."""
    if name.startswith(tuple(TIMM_PREFIX.values())):
        return None if name.rpartition(".")[2] == COUNTER else name
    for prefix in MODEL_PREFIXES:
        bare = name.removeprefix(prefix)
        match = DETECTRON2_NAME.fullmatch(bare)
        if match and name == prefix + bare and match["layer"] in LAYERS_BACK:
            return bare if exists(match["stage"], match["layer"], match["tensor"]) else None
    return None
