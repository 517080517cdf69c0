"""Detection configs: Detectron2's keys plus our section, read by `kscl.config`.

Detectron2's own reader lets YAML execute code.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode, get_cfg

from detection.scoring import BOX_SCORERS
from kscl.config import (
    Broken,
    Key,
    Rule,
    Schema,
    Section,
    as_type_of,
    find_config,
    key,
    leaves,
    nested,
    plain,
    value_at,
)
from kscl.data import labeled
from kscl.registry import Registry

VERSION = 2
BATCH_NORMS = ("BN", "SyncBN", "nnSyncBN", "naiveSyncBN", "naiveSyncBN_N", "FrozenBN")
NORM_KEY = "MODEL.RESNETS.NORM"
NORM_KEYS = (
    NORM_KEY,
    "MODEL.FPN.NORM",
    "MODEL.ROI_BOX_HEAD.NORM",
    "MODEL.ROI_MASK_HEAD.NORM",
    "MODEL.RETINANET.NORM",
)
WEIGHTS_KEY = "MODEL.WEIGHTS"
GRID_KEY = "KSCL.LR_GRID"
LONGER_KEY = "KSCL.LONGER"
SGD, ADAMW = "sgd", "adamw"
FULL_MODEL = "full_model"  # clips the gradients of all weights together; not in Detectron2
CLIP_TYPES = ("value", "norm", FULL_MODEL)
# Detectron2's keys for SGD.
OF_SGD = (
    *("SOLVER.MOMENTUM", "SOLVER.NESTEROV", "SOLVER.BIAS_LR_FACTOR"),
    *("SOLVER.WEIGHT_DECAY_NORM", "SOLVER.WEIGHT_DECAY_BIAS"),
)
FRACTION_KEY = "KSCL.FRACTION"
# Features of Detectron2 that this project lacks: the only value of a key, and why.
ONLY: dict[str, tuple[Any, str]] = {
    "DATALOADER.SAMPLER_TRAIN": ("TrainingSampler", "no other sampler is implemented"),
    "TEST.AUG.ENABLED": (False, "test images are not augmented"),
    "TEST.EXPECTED_RESULTS": ([], "results are not compared with expected ones"),
}


@dataclass(frozen=True)
class MetaArchitecture:
    """What this project must know about a meta-architecture registered with Detectron2."""

    classes_key: str
    coarsest: int  # stride of its coarsest feature map, if it has a pyramid
    has_masks: bool = False
    attributes: tuple[str, ...] = ()  # changed by training but not in the state dict
    new_parts: tuple[str, ...] = ("head.",)  # prefixes of its tensors that start at random


META_ARCHITECTURES: Registry[MetaArchitecture] = Registry("meta-architecture")
META_ARCHITECTURES.register(
    "GeneralizedRCNN",
    MetaArchitecture(
        "MODEL.ROI_HEADS.NUM_CLASSES",
        64,
        has_masks=True,
        new_parts=(
            *("proposal_generator.rpn_head.", "roi_heads.box_head.", "roi_heads.box_predictor."),
            *("roi_heads.mask_head.", "roi_heads.res5.norm."),
        ),
    ),
)
META_ARCHITECTURES.register(  # its loss is divided by a running mean of positive anchors
    "RetinaNet",
    MetaArchitecture("MODEL.RETINANET.NUM_CLASSES", 128, attributes=("loss_normalizer",)),
)
OUTPUT_DIR = "output/detection"  # Detectron2's ./output is for all our tools
# The structure of a detector besides its backbone.
DETECTOR_KEYS = (
    "MODEL.META_ARCHITECTURE",
    "MODEL.BACKBONE.NAME",
    "MODEL.RESNETS.OUT_FEATURES",
    "MODEL.FPN.IN_FEATURES",
    "MODEL.FPN.OUT_CHANNELS",
    "MODEL.FPN.FUSE_TYPE",
    "MODEL.FPN.NORM",
    "MODEL.PROPOSAL_GENERATOR.NAME",
    "MODEL.RPN.HEAD_NAME",
    "MODEL.RPN.IN_FEATURES",
    "MODEL.RPN.CONV_DIMS",
    "MODEL.ROI_HEADS.NAME",
    "MODEL.ROI_HEADS.IN_FEATURES",
    "MODEL.ROI_BOX_HEAD.NAME",
    "MODEL.ROI_BOX_HEAD.NUM_CONV",
    "MODEL.ROI_BOX_HEAD.CONV_DIM",
    "MODEL.ROI_BOX_HEAD.NUM_FC",
    "MODEL.ROI_BOX_HEAD.FC_DIM",
    "MODEL.ROI_BOX_HEAD.NORM",
    "MODEL.MASK_ON",
    "MODEL.ROI_MASK_HEAD.NAME",
    "MODEL.ROI_MASK_HEAD.NUM_CONV",
    "MODEL.ROI_MASK_HEAD.CONV_DIM",
    "MODEL.ROI_MASK_HEAD.NORM",
    "MODEL.KEYPOINT_ON",
    "MODEL.RETINANET.IN_FEATURES",
    "MODEL.RETINANET.NUM_CONVS",
    "MODEL.RETINANET.NORM",
)


class Kscl(Section):
    """Keys added to Detectron2's."""

    class KSCL(Section):
        """Settings of this project."""

        PROTOCOL = key(
            "", "The protocol's name: a leaderboard ranks rows only within one protocol."
        )
        LABEL = key(
            "",
            """The leaderboard's name for random weights or another project's file; our own
            pretraining runs have a LABEL.""",
        )
        CERTIFICATE = key(
            "", 'The certificate of MODEL.WEIGHTS; "" is certificate.json beside the weights.'
        )
        FROM_SCRATCH = key(False, 'Train from random weights; MODEL.WEIGHTS must then be "".')
        CLASS_NAMES = key([], "The class list, in order; [] is that of the training sets.")
        MAX_BAD_FRACTION = key(
            0.01,
            """Largest fraction of unreadable training images; up to it they are skipped. Every
            test image must be readable.""",
        )

        class TIMM(Section):
            """The network of a backbone that runs timm's own code."""

            NAME = key("", 'The timm name of the backbone; "" if Detectron2 builds the network.')
            KWARGS = key({}, "Arguments of that timm model.", any_key=True)

        OPTIMIZER = key(
            SGD,
            """The optimizer: `sgd` suits networks with BatchNorm, `adamw` transformers and
            ConvNeXt, without weight decay for biases, norms and position embeddings.""",
            choices=(SGD, ADAMW),
        )
        LAYER_DECAY = key(
            1.0,
            """Factor of the learning rate of each layer of a timm network relative to the next
            one. Needs `adamw`.""",
            above=0,
            at_most=1,
        )
        DROP_PATH = key(
            0.0,
            """Drop path rate of a timm network in training; 0 keeps that of pretraining, and a
            frozen network has none.""",
            at_least=0,
            below=1,
        )
        FRACTION = labeled.FRACTION
        DRAW = labeled.DRAW
        LONGER = key(
            1.0,
            """Train so many times as long as the protocol says (SOLVER.MAX_ITER, STEPS and
            WARMUP_ITERS), to spend a pretraining's time on the detector instead. The protocol
            stays the same; the row of the leaderboard says how much longer it was trained.""",
            at_least=1,
        )
        LR_GRID = key(
            [],
            """Learning rates to choose from on held-out training images; [] uses
            SOLVER.BASE_LR.""",
        )
        SCORER = key(
            "voc07-11pt",
            """The scorer of the headline AP; every run is scored by all of them, its masks by
            coco-101pt-segm.""",
            choices=tuple(BOX_SCORERS),
        )
        TF32 = key(False, "Let GPUs multiply in TF32 (10-bit mantissa); part of the protocol.")


def add_kscl_config(cfg: CfgNode) -> None:
    """Add our section, as Detectron2's projects add theirs."""
    cfg.KSCL = Schema.of(Kscl).defaults(CfgNode).KSCL


def detection_defaults() -> CfgNode:
    """Return the defaults of all keys, Detectron2's and ours."""
    cfg = get_cfg()
    add_kscl_config(cfg)
    cfg.OUTPUT_DIR = OUTPUT_DIR
    return cfg


def check_version(cfg: CfgNode) -> Iterator[Broken]:
    """Yield a problem if the config is of another version."""
    if cfg.VERSION != VERSION:
        yield ("VERSION",), f"only version {VERSION} of Detectron2's configs can be read"


def check_detection(cfg: CfgNode) -> Iterator[Broken]:
    """Yield every broken rule, except about data and weights."""
    yield from check_version(cfg)
    name = cfg.MODEL.META_ARCHITECTURE
    if name not in META_ARCHITECTURES:
        yield ("MODEL.META_ARCHITECTURE",), f"must be one of {', '.join(META_ARCHITECTURES)}"
    elif cfg.MODEL.MASK_ON and not META_ARCHITECTURES[name].has_masks:
        why = f"{name} has no masks: set MASK_ON False, or use a Mask R-CNN protocol"
        yield ("MODEL.MASK_ON", "MODEL.META_ARCHITECTURE"), why
    for key_, (only, reason) in ONLY.items():
        if value_at(cfg, key_) != only:
            yield (key_,), f"{reason}: set it to {only}"
    if cfg.SOLVER.CLIP_GRADIENTS.CLIP_TYPE not in CLIP_TYPES:
        yield ("SOLVER.CLIP_GRADIENTS.CLIP_TYPE",), f"must be one of {', '.join(CLIP_TYPES)}"
    if cfg.KSCL.OPTIMIZER == ADAMW:
        defaults = detection_defaults()
        for key_ in OF_SGD:
            if value_at(cfg, key_) != value_at(defaults, key_):
                yield (key_, "KSCL.OPTIMIZER"), "AdamW has no such setting: leave it out"
    elif cfg.KSCL.LAYER_DECAY != 1:
        yield ("KSCL.LAYER_DECAY", "KSCL.OPTIMIZER"), "layer-wise decay needs KSCL.OPTIMIZER adamw"
    grid = cfg.KSCL.LR_GRID
    rates = {rate for rate in grid if isinstance(rate, int | float) and 0 < rate < math.inf}
    if grid and (len(rates) < len(grid) or len(rates) < 2):
        yield (GRID_KEY,), "must be at least two different learning rates above 0"
    if grid and cfg.KSCL.FRACTION < 1:
        yield (GRID_KEY, FRACTION_KEY), "the rate would be chosen on other labels: set only one"


def detection_schema(*rules: Rule) -> Schema:
    """Return Detectron2's keys and ours, with the rules of a config."""
    ours = Schema.of(Kscl)
    keys = {name: Key(value) for name, value in leaves(detection_defaults())} | dict(ours.keys)
    # Items of Detectron2's lists have no fixed type: INPUT.CROP.SIZE has fractions or pixels.
    return Schema(keys, ours.docs, rules, check_items=False, make=detection_defaults)


def load_detection_config(
    config_file: str | Path | None = None,
    overrides: Sequence[str] = (),
    rules: Rule = check_detection,
) -> CfgNode:
    """Merge defaults, the file, its `_BASE_` and KEY VALUE; the result is not frozen.

    `rules` are those of training; a config that is only read needs `check_version`. Weights are
    found beside the config that names them, so a converted folder can be moved: a bare name is a
    file there, even if the current folder has one too.
    """
    cfg = detection_schema(rules).load(config_file, overrides)
    cfg.defrost()
    weights = cfg.MODEL.WEIGHTS
    if config_file is not None and weights and WEIGHTS_KEY not in overrides[::2]:
        beside = find_config(config_file).parent / weights
        is_bare = weights == Path(weights).name
        if (is_bare or not Path(weights).is_file()) and beside.is_file():
            cfg.MODEL.WEIGHTS = str(beside)
    return cfg


def of_timm_only(cfg: CfgNode) -> list[str]:
    """Return the changed keys that only networks in timm's code have."""
    keys = ("KSCL.LAYER_DECAY", "KSCL.DROP_PATH")
    defaults = detection_defaults()
    return [name for name in keys if value_at(cfg, name) != value_at(defaults, name)]


def norm_family(norm: str) -> str:
    """Return "BN" for every kind of BatchNorm: they have the same tensors."""
    return "BN" if norm in BATCH_NORMS else norm


def set_network(cfg: CfgNode, keys: Mapping[str, Any]) -> None:
    """Set the keys of a network in a protocol's config; keep its kind of BatchNorm."""
    for full, value in keys.items():
        old = value_at(cfg, full)
        if full == NORM_KEY and norm_family(old) == norm_family(value):
            continue
        section, _, name = full.rpartition(".")
        new = CfgNode(value, new_allowed=True) if isinstance(value, dict) else value
        value_at(cfg, section)[name] = new if isinstance(new, CfgNode) else as_type_of(old, new)


def changed_values(cfg: CfgNode, always: Container[str] = ()) -> dict[str, Any]:
    """Return what a file must have to give this config: non-defaults, and the keys in `always`."""
    defaults = dict(leaves(detection_defaults()))
    changed = {
        key: plain(value)
        for key, value in leaves(cfg)
        if key in always or key not in defaults or value != defaults[key]
    }
    return nested(changed | {"VERSION": VERSION})
