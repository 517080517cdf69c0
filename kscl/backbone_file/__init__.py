"""Backbones in files: writing ours, and reading ours or another project's, tensor by tensor.

A file is read by an explicit table of layouts. Every tensor of the backbone must be found and every
tensor of the file must be used or be on the layout's list of things to leave behind; anything else
is an error, because a network that is silently half loaded gives a wrong number much later.
"""

from kscl.backbone_file.describe import (
    DESCRIPTION,
    DESCRIPTION_VERSION,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Description,
)
from kscl.backbone_file.layouts import LAYOUTS, Layout, find_tensors
from kscl.backbone_file.read import (
    OUR_FILE,
    RANDOM,
    Loaded,
    load_backbone,
    read_plain,
    tensors_hash,
)
from kscl.backbone_file.write import save_backbone, to_safetensors

__all__ = [
    "DESCRIPTION",
    "DESCRIPTION_VERSION",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "LAYOUTS",
    "OUR_FILE",
    "RANDOM",
    "Description",
    "Layout",
    "Loaded",
    "find_tensors",
    "load_backbone",
    "read_plain",
    "save_backbone",
    "tensors_hash",
    "to_safetensors",
]
