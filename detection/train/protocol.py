"""The protocol of a run: the settings that make two AP figures comparable."""

from __future__ import annotations

from detectron2.config import CfgNode

from kscl.config.tree import leaves_without, plain
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
    "SOLVER.CHECKPOINT_PERIOD",
)
# What comes with the weights: other contenders have other networks under the same protocol.
THE_CONTENDERS_OWN = (
    "MODEL.RESNETS.DEPTH",
    "MODEL.RESNETS.NUM_GROUPS",
    "MODEL.RESNETS.WIDTH_PER_GROUP",
    "MODEL.RESNETS.RES2_OUT_CHANNELS",
    "MODEL.RESNETS.STEM_OUT_CHANNELS",
    "MODEL.PIXEL_MEAN",
    "MODEL.PIXEL_STD",
    "KSCL.FROM_SCRATCH",
    "SEED",
)


def protocol_of(cfg: CfgNode) -> Protocol:
    """Return all settings but the contender's own: its weights, its network and the seed."""
    # Where it is False, records from before this key have the same protocol.
    tf32 = () if cfg.KSCL.TF32 else ("KSCL.TF32",)
    without = (*WITHOUT_EFFECT, *THE_CONTENDERS_OWN, "KSCL.PROTOCOL", *tf32)
    definition = leaves_without(plain(cfg), without)
    return Protocol(cfg.KSCL.PROTOCOL or "unnamed", definition)
