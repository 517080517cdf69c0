"""Backbones in files: writing ours, and reading ours or another project's, tensor by tensor.

A file is read by an explicit table of layouts. Every tensor of the backbone must be found and every
other tensor must be on the layout's list of things to leave behind, or the user must name the
place; anything else is an error, because a network that is silently half loaded, or is not the one
that was meant, gives a wrong number much later.
"""

from kscl.backbone_file.file import (
    DESCRIPTION_VERSION,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Description,
    save_backbone,
    to_safetensors,
)
from kscl.backbone_file.layouts import LAYOUTS
from kscl.backbone_file.load import OWN_LAYOUTS, RANDOM, Loaded, load_backbone, tensors_hash
from kscl.backbone_file.named import cached_weights, checked_hash, find_weights
from kscl.backbone_file.read import read_arrays_pickle, read_plain

__all__ = [
    "DESCRIPTION_VERSION",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "LAYOUTS",
    "OWN_LAYOUTS",
    "RANDOM",
    "Description",
    "Loaded",
    "cached_weights",
    "checked_hash",
    "find_weights",
    "load_backbone",
    "read_arrays_pickle",
    "read_plain",
    "save_backbone",
    "tensors_hash",
    "to_safetensors",
]
