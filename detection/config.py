"""Detection configs: Detectron2's own tree with one section of ours, read strictly and safely.

Detectron2 reads YAML with code execution allowed; here a file is data, read by
`kscl.config` as all configs are.
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
from kscl.data.labeled import OF_SEED
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
FULL_MODEL = "full_model"  # clips the gradients of all weights together; Detectron2 has the others
CLIP_TYPES = ("value", "norm", FULL_MODEL)
# Detectron2's keys for SGD, which AdamW has no use for.
OF_SGD = (
    *("SOLVER.MOMENTUM", "SOLVER.NESTEROV", "SOLVER.BIAS_LR_FACTOR"),
    *("SOLVER.WEIGHT_DECAY_NORM", "SOLVER.WEIGHT_DECAY_BIAS"),
)
FRACTION_KEY = "KSCL.FRACTION"
# What Detectron2 does and this project does not: the only value of a key, and why.
ONLY: dict[str, tuple[Any, str]] = {
    "DATALOADER.SAMPLER_TRAIN": ("TrainingSampler", "no other sampler is implemented"),
    "TEST.AUG.ENABLED": (False, "test images are not augmented"),
    "TEST.EXPECTED_RESULTS": ([], "results are not compared with expected ones"),
}


@dataclass(frozen=True)
class MetaArchitecture:
    """What this project must know of a meta-architecture that is registered with Detectron2."""

    classes_key: str
    coarsest: int  # stride of its coarsest feature map, if it has a pyramid
    has_masks: bool = False
    attributes: tuple[str, ...] = ()  # which training changes and no state dict holds
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
META_ARCHITECTURES.register(  # it divides its loss by a running mean of the positive anchors
    "RetinaNet",
    MetaArchitecture("MODEL.RETINANET.NUM_CLASSES", 128, attributes=("loss_normalizer",)),
)
OUTPUT_DIR = "output/detection"  # Detectron2's ./output is the folder of all our tools
# What a detector is made of beside its backbone network: another value is another detector.
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
    """What is added to Detectron2's keys."""

    class KSCL(Section):
        """Settings of this project."""

        PROTOCOL = key(
            "",
            """The name of the protocol: rows of a leaderboard are ranked only within one
            protocol.""",
        )
        LABEL = key(
            "",
            """What the leaderboard calls random weights or another project's file; a pretraining
            of ours has a LABEL of its own.""",
        )
        CERTIFICATE = key(
            "", 'The certificate of MODEL.WEIGHTS; "" is certificate.json beside the weights.'
        )
        FROM_SCRATCH = key(False, 'Train from random weights; MODEL.WEIGHTS must then be "".')
        CLASS_NAMES = key([], "The class list, in order; [] is that of the training sets.")
        MAX_BAD_FRACTION = key(
            0.01,
            """A larger fraction of unreadable training images stops the run; up to it they are
            skipped. Every test image must be readable.""",
        )

        class TIMM(Section):
            """The network of a backbone that runs timm's own code."""

            NAME = key(
                "",
                """The timm name of the backbone; "" where Detectron2 builds the network itself.""",
            )
            KWARGS = key({}, "Arguments of that timm model.", any_key=True)

        OPTIMIZER = key(
            SGD,
            """What trains the detector: `sgd` suits networks with BatchNorm, `adamw` transformers
            and ConvNeXt, without weight decay for biases, norms and position embeddings.""",
            choices=(SGD, ADAMW),
        )
        LAYER_DECAY = key(
            1.0,
            """Each layer of a timm network learns this many times as fast as the layer after it;
            the layers are timm's. Needs `adamw`.""",
            above=0,
            at_most=1,
        )
        DROP_PATH = key(
            0.0,
            """The drop path rate of a timm network in training; 0 leaves it as it was pretrained,
            and a frozen network has none.""",
            at_least=0,
            below=1,
        )
        FRACTION = key(
            1.0,
            """Fraction of the training images, drawn at random such that every class is shown;
            smaller fractions are parts of larger ones.""",
            above=0,
            at_most=1,
        )
        DRAW = key(
            OF_SEED,
            """Number of the random draw of FRACTION: equal numbers give equal images; -1 takes
            SEED.""",
            at_least=OF_SEED,
        )
        LONGER = key(
            1.0,
            """Train so many times as long as the protocol says (SOLVER.MAX_ITER, STEPS and
            WARMUP_ITERS), to spend a pretraining's time on the detector instead. The protocol
            stays the same; the row of the leaderboard says how much longer it was trained.""",
            at_least=1,
        )
        LR_GRID = key(
            [],
            """Learning rates to choose from on a part of the training images; [] takes
            SOLVER.BASE_LR.""",
        )
        SCORER = key(
            "voc07-11pt",
            """Whose AP is the headline; every run is scored by all of them, its masks by
            coco-101pt-segm.""",
            choices=tuple(BOX_SCORERS),
        )
        TF32 = key(
            False, "Let GPUs multiply float32 numbers rounded to 10 bits: TF32, another protocol."
        )


def add_kscl_config(cfg: CfgNode) -> None:
    """Add our section, as Detectron2's projects add theirs."""
    cfg.KSCL = Schema.of(Kscl).defaults(CfgNode).KSCL


def detection_defaults() -> CfgNode:
    """Return a new tree with every key of Detectron2's and ours."""
    cfg = get_cfg()
    add_kscl_config(cfg)
    cfg.OUTPUT_DIR = OUTPUT_DIR
    return cfg


def check_version(cfg: CfgNode) -> Iterator[Broken]:
    """Yield the rule that a config must keep to be read at all."""
    if cfg.VERSION != VERSION:
        yield ("VERSION",), f"only version {VERSION} of Detectron2's configs can be read"


def check_detection(cfg: CfgNode) -> Iterator[Broken]:
    """Yield every broken rule; what concerns data and weights is checked where they are read."""
    yield from check_version(cfg)
    name = cfg.MODEL.META_ARCHITECTURE
    if name not in META_ARCHITECTURES:
        yield ("MODEL.META_ARCHITECTURE",), f"must be one of {', '.join(META_ARCHITECTURES)}"
    elif cfg.MODEL.MASK_ON and not META_ARCHITECTURES[name].has_masks:
        yield (
            ("MODEL.MASK_ON", "MODEL.META_ARCHITECTURE"),
            f"{name} has no masks: set MASK_ON False, or take a protocol of Mask R-CNN",
        )
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
        yield (
            (GRID_KEY, FRACTION_KEY),
            "the rate is chosen on labels beyond the fraction: set one of the two",
        )


def detection_schema(*rules: Rule) -> Schema:
    """Return Detectron2's keys and ours, with the rules that a config must keep."""
    ours = Schema.of(Kscl)
    keys = {name: Key(value) for name, value in leaves(detection_defaults())} | dict(ours.keys)
    # Items of Detectron2's lists have no fixed type: INPUT.CROP.SIZE holds fractions or pixels.
    return Schema(keys, ours.docs, rules, check_items=False, make=detection_defaults)


def load_detection_config(
    config_file: str | Path | None = None,
    overrides: Sequence[str] = (),
    rules: Rule = check_detection,
) -> CfgNode:
    """Return Detectron2's defaults with the file, its `_BASE_` and KEY VALUE merged; not frozen.

    `rules` are those of a training; a config that is only read needs `check_version`.
    """
    cfg = detection_schema(rules).load(config_file, overrides)
    cfg.defrost()
    if config_file is not None and WEIGHTS_KEY not in overrides[::2]:
        _find_weights_beside(cfg, find_config(config_file))
    return cfg


def of_timm_only(cfg: CfgNode) -> list[str]:
    """Return the keys that are set and only have a meaning for a network in timm's code."""
    keys = ("KSCL.LAYER_DECAY", "KSCL.DROP_PATH")
    defaults = detection_defaults()
    return [name for name in keys if value_at(cfg, name) != value_at(defaults, name)]


def norm_family(norm: str) -> str:
    """Return "BN" for every kind of BatchNorm: they hold the same tensors."""
    return "BN" if norm in BATCH_NORMS else norm


def set_network(cfg: CfgNode, keys: Mapping[str, Any]) -> None:
    """Make a protocol's config that of a given network; its kind of BatchNorm stays."""
    for full, value in keys.items():
        old = value_at(cfg, full)
        if full == NORM_KEY and norm_family(old) == norm_family(value):
            continue
        section, _, name = full.rpartition(".")
        new = CfgNode(value, new_allowed=True) if isinstance(value, dict) else value
        value_at(cfg, section)[name] = new if isinstance(new, CfgNode) else as_type_of(old, new)


def changed_values(cfg: CfgNode, always: Container[str] = ()) -> dict[str, Any]:
    """Return what a file must say to give this config again: all that is not a default.

    The keys in `always` are included even where they are the default, for the reader.
    """
    defaults = dict(leaves(detection_defaults()))
    changed = {
        key: plain(value)
        for key, value in leaves(cfg)
        if key in always or key not in defaults or value != defaults[key]
    }
    return nested(changed | {"VERSION": VERSION})


def _find_weights_beside(cfg: CfgNode, path: Path) -> None:
    """Find the weights beside the config that names them: a converted folder can be moved.

    A bare name is that of the file beside the config even if the current folder has one too.
    """
    weights = cfg.MODEL.WEIGHTS
    is_bare = weights == Path(weights).name
    if weights and (is_bare or not Path(weights).is_file()) and (path.parent / weights).is_file():
        cfg.MODEL.WEIGHTS = str(path.parent / weights)
