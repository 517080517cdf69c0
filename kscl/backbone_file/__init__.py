"""Backbones in files: writing ours, and reading ours or another project's, tensor by tensor.

A file is read by an explicit table of layouts. Every tensor of the backbone must be found and every
tensor beside it must be on the layout's list of things to leave behind, or the user must name the
place; anything else is an error, because a network that is silently half loaded, or is not the one
that was meant, gives a wrong number much later.
"""

from kscl.backbone_file.describe import (
    DESCRIPTION,
    DESCRIPTION_VERSION,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Description,
)
from kscl.backbone_file.find import find_tensors
from kscl.backbone_file.layouts import LAYOUTS, Layout
from kscl.backbone_file.read import (
    OUR_FILE,
    OWN_LAYOUTS,
    RANDOM,
    Loaded,
    load_backbone,
    tensors_hash,
)
from kscl.backbone_file.unpickle import read_arrays_pickle, read_plain, read_tensors
from kscl.backbone_file.write import save_backbone, to_safetensors

__all__ = [
    "DESCRIPTION",
    "DESCRIPTION_VERSION",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "LAYOUTS",
    "OUR_FILE",
    "OWN_LAYOUTS",
    "RANDOM",
    "Description",
    "Layout",
    "Loaded",
    "find_tensors",
    "load_backbone",
    "read_arrays_pickle",
    "read_plain",
    "read_tensors",
    "save_backbone",
    "tensors_hash",
    "to_safetensors",
]
