"""Where the weights of a new run come from: its seed, or a file named by BACKBONE.WEIGHTS."""

from __future__ import annotations

import logging

import torch
from fvcore.common.config import CfgNode

from kscl.backbone_file import RANDOM, load_backbone
from kscl.config.tree import config_values
from kscl.errors import KsclError
from kscl.method.learner import Learner

log = logging.getLogger(__name__)


def start_from_weights(learner: Learner, cfg: CfgNode) -> dict[str, str]:
    """Load BACKBONE.WEIGHTS into both encoders; return the inputs of the record: its SHA-256."""
    weights = cfg.BACKBONE.WEIGHTS
    if not weights:
        return {}
    if weights == RANDOM:
        raise KsclError(
            f"BACKBONE.WEIGHTS is '{RANDOM}', but pretraining draws random weights from SEED by "
            "itself: leave it empty."
        )
    network = config_values(cfg)["BACKBONE"]
    with torch.random.fork_rng(devices=[]):  # a start from a file leaves all random streams alone
        loaded = load_backbone(
            weights,
            network["NAME"],
            network["KWARGS"],
            container=network["CONTAINER"] or None,
            prefix=network["PREFIX"] or None,
            mean=cfg.INPUT.MEAN,
            std=cfg.INPUT.STD,
        )
    for sentence in loaded.said:
        log.info(sentence)
    for encoder in (learner.encoder, learner.key_encoder):
        if encoder is not None:
            encoder.backbone.load_state_dict(loaded.backbone.state_dict())
    assert loaded.file_sha256 is not None  # only random weights have no file
    return {"weights": loaded.file_sha256}
