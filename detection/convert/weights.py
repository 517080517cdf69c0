"""Converted weights: their names, safe reading, and a check after loading.

Detectron2 matches names by suffix and raises no error if none match, so after every load the
model's tensors are compared with the file's.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from torch import Tensor, nn

from detection.config import META_ARCHITECTURES
from kscl.backbone_file import read_arrays_pickle, read_plain
from kscl.backbone_file.detectron2 import AUTHOR, COUNTER, bare_name
from kscl.backbone_file.read import some
from kscl.errors import KsclError

# Parts of a detector's backbone that start at random.
PYRAMIDS = (
    *("backbone.fpn_lateral", "backbone.fpn_output", "backbone.simfp_", "backbone.top_block."),
)
INPUT_BUFFERS = ("pixel_mean", "pixel_std")  # set from the config
CONVERT_IT = "Convert the source: kscl convert FILE --output-dir FOLDER"
# Prefixes of a timm network's tensors in a detector and in converted files: under an FPN, and under
# a simple feature pyramid.
UNDER_FPN, UNDER_PLAIN_PYRAMID = "backbone.bottom_up.network.", "backbone.net.network."


def is_counter(name: str) -> bool:
    """Return whether a tensor is BatchNorm's batch counter, which has no effect."""
    return name.rpartition(".")[2] == COUNTER


def name_in_file(name: str) -> str | None:
    """Return the name in a weights file of a model's tensor; None if it is not the network's."""
    if _is_timms(name):
        return None if is_counter(name) else name
    return bare_name(name)


def _is_timms(name: str) -> bool:
    return name.startswith((UNDER_FPN, UNDER_PLAIN_PYRAMID))


def weights_bytes(tensors: Mapping[str, Tensor], file_format: str = "pth") -> bytes:
    """Serialize with the fields that Detectron2's loader needs."""
    if file_format == "pkl":
        arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
        return pickle.dumps(_marked(arrays), protocol=4)
    content = io.BytesIO()
    torch.save(_marked(tensors), content)
    return content.getvalue()


def _marked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file.

    Names of a ResNet have no prefix and are matched by suffix, so that res5 goes into a C4's head;
    those of a timm network are complete.
    """
    by_ends = not any(_is_timms(name) for name in values)
    return {"model": dict(values), "matching_heuristics": by_ends, "__author__": AUTHOR}


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a converted file by Detectron2's names; any other file is an error."""
    path = Path(path)
    if not path.is_file():
        raise KsclError(f"{path}: there is no such file of converted weights. {CONVERT_IT}")
    content = read_arrays_pickle(path) if path.suffix == ".pkl" else read_plain(path)
    tensors = content.get("model")
    if "__author__" not in content or not isinstance(tensors, dict) or not tensors:
        raise KsclError(
            f"{path} is not a converted file: Detectron2 would silently load little or nothing of "
            f"it. {CONVERT_IT}"
        )
    return {key: value for key, value in tensors.items() if isinstance(value, Tensor)}


def load_weights(model: nn.Module, path: str | Path) -> int:
    """Load by Detectron2's own name matching, and check; return the number of tensors."""
    tensors = read_weights(path)
    # Not the path: Detectron2 would execute code in a .pkl.
    with quietly("fvcore.common.checkpoint", "detectron2"):
        DetectionCheckpointer(model)._load_model(_marked(tensors))
    return compare(model, tensors, path)


def compare(model: nn.Module, from_file: dict[str, Tensor], path: str | Path) -> int:
    """Raise an error unless the model's network has exactly the tensors of the file."""
    state = model.state_dict()
    in_model = {bare: state[name] for name in state if (bare := name_in_file(name)) is not None}
    absent = [key for key in in_model if key not in from_file]
    unused = [key for key in from_file if key not in in_model]
    both = [key for key in in_model if key in from_file]
    different = [key for key in both if not _same(in_model[key], from_file[key])]
    if absent or unused or different:
        loaded = len(in_model) - len(absent) - len(different)
        reasons = [
            f"  {text}: {some(keys)}"
            for keys, text in (
                (absent, "not in the file, so random"),
                (different, "with another shape or value than in the file"),
                (unused, "in the file, but not in the model"),
            )
            if keys
        ]
        raise KsclError(
            f"The model has {loaded} of the {len(in_model)} tensors of its network from {path}:\n"
            + "\n".join(reasons)
            + "\nUse the config of the weights: config.yaml beside them."
        )
    return len(in_model)


def _same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and torch.equal(ours.detach().cpu(), theirs.to(ours.dtype))


def check_rest_is_new(model: nn.Module, kind: str) -> None:
    """Raise an error if a part outside of the network is not known to start at random."""
    new_parts = (*PYRAMIDS, *META_ARCHITECTURES[kind].new_parts)
    unknown = [
        key
        for key in model.state_dict()
        if name_in_file(key) is None
        and not is_counter(key)
        and not key.startswith(new_parts)
        and key not in INPUT_BUFFERS
    ]
    if unknown:
        raise KsclError(
            "The detector has parts that are neither in the weights nor known to start at random: "
            f"{some(unknown)}. Use a config from configs/detection/."
        )


@contextmanager
def quietly(*names: str) -> Iterator[None]:
    """Silence loggers: Detectron2 gives the same warning for good and failed loads."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
