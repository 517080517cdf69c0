"""The protocol of a run: the settings that make two AP figures comparable."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode

from detection.backbones import PLAIN_BUILDERS, PLAIN_NORM, PROTOCOL_BUILDERS
from detection.config import (
    DETECTOR_KEYS,
    FRACTION_KEY,
    GRID_KEY,
    LONGER_KEY,
    NORM_KEY,
    NORM_KEYS,
    load_detection_config,
)
from kscl.config import leaves_without, one_line, plain, shipped_configs, value_at
from kscl.data.annotated.coco import COCO_NAMES
from kscl.data.annotations import parse_source
from kscl.data.labeled import FRACTION_IN_PROTOCOL, percent_words
from kscl.records.record import Protocol

BUILDER_KEY = "MODEL.BACKBONE.NAME"
SCORER_KEY = "KSCL.SCORER"
RATE_KEY = "SOLVER.BASE_LR"
# Two runs that differ only here give the same numbers.
WITHOUT_EFFECT = (
    "OUTPUT_DIR",
    "VERSION",
    "VIS_PERIOD",
    "CUDNN_BENCHMARK",
    "DATASETS.TRAIN",  # the record has the data's fingerprints
    "DATASETS.TEST",
    "DATALOADER.NUM_WORKERS",
    "MODEL.DEVICE",
    "MODEL.WEIGHTS",  # the record has their hash
    "KSCL.CERTIFICATE",
    "KSCL.LABEL",
    "KSCL.MAX_BAD_FRACTION",  # the record lists the images
    "SOLVER.CHECKPOINT_PERIOD",
    "SOLVER.REFERENCE_WORLD_SIZE",  # the scaled batch, learning rate and schedule count
    "TEST.EVAL_PERIOD",  # an evaluation does not affect training
)
# Keys of a ResNet that Detectron2 builds.
OF_RESNETS = (
    "MODEL.RESNETS.DEPTH",
    "MODEL.RESNETS.NUM_GROUPS",
    "MODEL.RESNETS.WIDTH_PER_GROUP",
    "MODEL.RESNETS.RES2_OUT_CHANNELS",
    "MODEL.RESNETS.STEM_OUT_CHANNELS",
)
# Keys that come with the weights, those of replicates, and a longer training, which the row's name
# shows: one protocol compares any of them.
THE_CONTENDERS_OWN = (
    *OF_RESNETS,
    "MODEL.RESNETS.STRIDE_IN_1X1",
    "MODEL.PIXEL_MEAN",
    "MODEL.PIXEL_STD",
    "KSCL.TIMM",
    "KSCL.FROM_SCRATCH",
    "SEED",
    "KSCL.DRAW",
    LONGER_KEY,
)
# A protocol's name shows changes of these by key and value, and other data by the sets' names.
NAMED_BY_VALUE = tuple(key for key in (NORM_KEY, *DETECTOR_KEYS, SCORER_KEY) if key != BUILDER_KEY)
OF_DATA = ("MODEL.ROI_HEADS.NUM_CLASSES", "MODEL.RETINANET.NUM_CLASSES", "KSCL.CLASS_NAMES")
CHANGED = " (changed)"  # ends the name if any other setting is not as shipped
SIMPLE_PYRAMID = "-simple-pyramid"  # in the name of a protocol for plain transformers
LR_SEARCH = "-lr-search"  # in the name if the learning rate is searched


def protocol_of(cfg: CfgNode, processes: Sequence[int] = (1,), iterations: int = 0) -> Protocol:
    """Return all settings except the contender's own weights, network and seed.

    `processes` has the number of processes in every part of the run, since each computes plain
    BatchNorm on its own images. `iterations` are those of a detector whose training has not ended.
    """
    definition, name = _definition(cfg), _name(cfg)
    if max(processes) > 1 and any(value_at(cfg, key) == "BN" for key in NORM_KEYS):
        definition["processes"] = list(processes)
    if iterations:
        definition["iterations"] = iterations
        name += f" (after {iterations} of {schedule(cfg).MAX_ITER} iterations)"
    return Protocol(name, definition)


def schedule(cfg: CfgNode) -> CfgNode:
    """Return SOLVER with the iterations that are trained: the protocol's, times KSCL.LONGER."""
    solver, times = cfg.SOLVER.clone(), cfg.KSCL.LONGER
    solver.defrost()
    solver.MAX_ITER = round(times * solver.MAX_ITER)
    solver.STEPS = tuple(round(times * step) for step in solver.STEPS)
    solver.WARMUP_ITERS = round(times * solver.WARMUP_ITERS)
    return solver


def _definition(cfg: CfgNode) -> dict[str, Any]:
    without = (*WITHOUT_EFFECT, *THE_CONTENDERS_OWN, "KSCL.PROTOCOL", FRACTION_KEY)
    definition = leaves_without(plain(cfg), without)
    if cfg.KSCL.FRACTION < 1:
        definition[FRACTION_IN_PROTOCOL] = cfg.KSCL.FRACTION
    if not _has_simple_pyramid(cfg):
        # Detectron2's ResNet and a timm network have the same FPN on top.
        builder = definition[BUILDER_KEY]
        definition[BUILDER_KEY] = PROTOCOL_BUILDERS.get(builder, builder)
    # With a grid, the learning rate is a result, not a setting.
    definition.pop(RATE_KEY if cfg.KSCL.LR_GRID else GRID_KEY)
    return definition


def _has_simple_pyramid(cfg: CfgNode) -> bool:
    return cfg.MODEL.BACKBONE.NAME in PLAIN_BUILDERS


def _name(cfg: CfgNode) -> str:
    """Return the protocol's name, which shows every change to a shipped protocol.

    Published numbers are matched by name, so it is the shipped one only if all settings are.
    """
    name = cfg.KSCL.PROTOCOL or "unnamed"
    shipped = shipped_configs() / "detection" / f"{name.replace('-', '_')}.yaml"
    changes, fraction = "", percent_words(cfg.KSCL.FRACTION)
    if cfg.KSCL.PROTOCOL and shipped.is_file():
        shipped_cfg = load_detection_config(shipped)
        ours, theirs = _definition(cfg), _definition(shipped_cfg)
        if _has_simple_pyramid(cfg):  # which its name says
            theirs["MODEL.FPN.NORM"] = PLAIN_NORM
        changes = "".join(
            f"+{key}={one_line(ours[key])}" for key in NAMED_BY_VALUE if ours[key] != theirs[key]
        )
        sets = _set_names(cfg)
        if sets != _set_names(shipped_cfg):
            names = dict.fromkeys(name for role in sets for name in role)
            changes += f"+DATASETS={','.join(names)}"
        if cfg.KSCL.FRACTION == shipped_cfg.KSCL.FRACTION:  # the name says it
            fraction = ""
        named = {*NAMED_BY_VALUE, *OF_DATA, BUILDER_KEY, FRACTION_IN_PROTOCOL}
        if cfg.KSCL.LR_GRID:  # -lr-search
            named |= {RATE_KEY, GRID_KEY}
        if any(ours.get(key) != theirs.get(key) for key in {*ours, *theirs} - named):
            changes += CHANGED
    pyramid = SIMPLE_PYRAMID if _has_simple_pyramid(cfg) else ""
    return name + fraction + pyramid + (LR_SEARCH if cfg.KSCL.LR_GRID else "") + changes


def _set_names(cfg: CfgNode) -> list[list[str]]:
    """Return the names of the training and the test sets, without their location."""
    return [
        [_set_name(name) for name in names] for names in (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST)
    ]


def _set_name(name: str) -> str:
    """Return the name of a VOC set's folder, or of the folder around the annotations."""
    source = parse_source(name)
    if source.annotations is None:
        return Path(os.path.abspath(source.root)).name
    if source.annotations.stem in {Path(file).stem for file, _ in COCO_NAMES.values()}:
        return "COCO"
    around = reversed(Path(os.path.abspath(source.annotations)).parent.parts)
    return next(part for part in around if part not in ("annotations", "coco", "gtFine"))
