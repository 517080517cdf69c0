"""The protocol of a run: the settings that make two AP figures comparable."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from detectron2.config import CfgNode

from detection.config import DETECTOR_KEYS, NORM_KEY, NORM_KEYS, load_detection_config
from detection.convert.routes import PLAIN_BUILDERS, PROTOCOL_BUILDERS
from kscl.config.shipped import shipped_configs
from kscl.config.tree import leaves_without, one_line, plain, value_at
from kscl.data.annotated.specs import COCO_NAMES, parse_source
from kscl.records.record import Protocol

# Where and how, not what: two runs that differ only here give the same numbers.
WITHOUT_EFFECT = (
    "OUTPUT_DIR",
    "VERSION",
    "VIS_PERIOD",
    "CUDNN_BENCHMARK",
    "DATASETS.TRAIN",  # the data's fingerprints stand for them
    "DATASETS.TEST",
    "DATALOADER.NUM_WORKERS",
    "MODEL.DEVICE",
    "MODEL.WEIGHTS",  # their hash stands for them
    "KSCL.CERTIFICATE",
    "KSCL.LABEL",
    "KSCL.MAX_BAD_FRACTION",  # the record lists the images
    "SOLVER.CHECKPOINT_PERIOD",
)
# What makes a ResNet that Detectron2 builds another network.
OF_RESNETS = (
    "MODEL.RESNETS.DEPTH",
    "MODEL.RESNETS.NUM_GROUPS",
    "MODEL.RESNETS.WIDTH_PER_GROUP",
    "MODEL.RESNETS.RES2_OUT_CHANNELS",
    "MODEL.RESNETS.STEM_OUT_CHANNELS",
)
# What comes with the weights: other contenders have other networks under the same protocol.
THE_CONTENDERS_OWN = (
    *OF_RESNETS,
    "MODEL.PIXEL_MEAN",
    "MODEL.PIXEL_STD",
    "KSCL.TIMM",
    "KSCL.FROM_SCRATCH",
    "SEED",
)


BUILDER_KEY = "MODEL.BACKBONE.NAME"
SCORER_KEY = "KSCL.SCORER"
SIMPLE_PYRAMID = "-simple-pyramid"  # what the name of a protocol ends in for plain transformers
LR_SEARCH = "-lr-search"  # and where the learning rate is chosen


def protocol_of(cfg: CfgNode, processes: Sequence[int] = (1,)) -> Protocol:
    """Return all settings but the contender's own: its weights, its network and the seed.

    `processes` is the number of them in every part of the run: each computes the statistics of a
    plain BatchNorm on its own images.
    """
    # Where it is False, records from before this key have the same protocol.
    tf32 = () if cfg.KSCL.TF32 else ("KSCL.TF32",)
    without = (*WITHOUT_EFFECT, *THE_CONTENDERS_OWN, "KSCL.PROTOCOL", *tf32)
    definition = leaves_without(plain(cfg), without)
    if not _has_simple_pyramid(cfg):
        # The same FPN stands on Detectron2's ResNet and on a timm network.
        builder = definition[BUILDER_KEY]
        definition[BUILDER_KEY] = PROTOCOL_BUILDERS.get(builder, builder)
    # With a grid the learning rate is found, not set.
    definition.pop("SOLVER.BASE_LR" if cfg.KSCL.LR_GRID else "KSCL.LR_GRID")
    if max(processes) > 1 and any(value_at(cfg, key) == "BN" for key in NORM_KEYS):
        definition["processes"] = list(processes)
    return Protocol(_name(cfg), definition)


def _has_simple_pyramid(cfg: CfgNode) -> bool:
    return cfg.MODEL.BACKBONE.NAME in PLAIN_BUILDERS


def _name(cfg: CfgNode) -> str:
    """Return the protocol's name, which says what is not as shipped.

    That is data, heads, norms and scorer: published numbers are attached by the name.
    """
    name = cfg.KSCL.PROTOCOL or "unnamed"
    shipped = shipped_configs() / "detection" / f"{name.replace('-', '_')}.yaml"
    changes = ""
    if cfg.KSCL.PROTOCOL and shipped.is_file():
        theirs = load_detection_config(shipped)
        for key in (NORM_KEY, *DETECTOR_KEYS, SCORER_KEY):
            ours = plain(value_at(cfg, key))
            if key != BUILDER_KEY and ours != plain(value_at(theirs, key)):
                changes += f"+{key}={one_line(ours)}"
        ours = _set_names(cfg)
        if ours != _set_names(theirs):
            names = dict.fromkeys(name for role in ours for name in role)
            changes += f"+DATASETS={','.join(names)}"
    pyramid = SIMPLE_PYRAMID if _has_simple_pyramid(cfg) else ""
    return name + pyramid + (LR_SEARCH if cfg.KSCL.LR_GRID else "") + changes


def _set_names(cfg: CfgNode) -> list[list[str]]:
    """Return what the sets to train on and to test on are called, wherever they are."""
    return [
        [_set_name(name) for name in names] for names in (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST)
    ]


def _set_name(name: str) -> str:
    """Return the folder's name of a VOC set, and that around the file of a COCO set."""
    source = parse_source(name)
    if source.json_file is None:
        return Path(os.path.abspath(source.root)).name
    if source.json_file.stem in {annotations for _, annotations in COCO_NAMES.values()}:
        return "COCO"
    around = reversed(Path(os.path.abspath(source.json_file)).parent.parts)
    return next(part for part in around if part not in ("annotations", "coco"))
